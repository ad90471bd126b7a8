"""Chat templates: Jinja programs that come with a model and turn messages into its prompt.

They run as Hugging Face runs them (same whitespace rules, same globals), in a sandbox: they are other
people's code.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specjax.errors import SpecjaxError

Message = Mapping[str, Any]


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; for rendering its body is all there is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own name and type

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(
    template: str, messages: Sequence[Message], special_tokens: Mapping[str, str], add_generation_prompt: bool
) -> str:
    """Return the prompt for `messages`; `special_tokens` are the template's bos_token, eos_token and so on.

    Raises SpecjaxError where the template is broken or refuses the messages.
    """
    try:
        return _compiled(template).render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    except jinja2.TemplateSyntaxError as error:
        raise SpecjaxError(f"the chat template is broken at line {error.lineno}: {error.message}.") from error
    except (jinja2.TemplateError, TypeError) as error:
        raise SpecjaxError(
            f"the chat template does not take these messages: {error}. Each needs a 'role' and a 'content', "
            "and many templates want user and assistant to alternate."
        ) from error


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
