"""What to expect of a method before running it, and pictures of what came out."""
