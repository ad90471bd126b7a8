"""Published weights in; what does not fit is refused by the name of its tensor, field or file."""
