"""Render chat templates in child processes. Whoever made the model wrote its template, and it could loop for ever.

Invariant: a rendering ends within `LIMITS`, and gives what transformers gives. jinja's own sandbox keeps a template from
running other code. Left out: limits on the tokenizer, which is compiled code of the library `tokenizers`.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from jinja2 import TemplateError

from shoal.model.support import UnsupportedModelError
from shoal.sandbox import PLAIN, ProgramLimits, RemoteFunction, Sandbox

LIMITS = ProgramLimits(wall_s=60.0, cpu_s=5.0, memory_bytes=1 << 29, output_bytes=16 << 20)
RENDERER = """
import os
os.environ["USE_TORCH"] = "0"  # rendering needs no torch, whose import takes seconds and much memory
from transformers.utils.chat_template_utils import render_jinja_template
def render(options):
    [text], _ = render_jinja_template(**options)
    return text
"""


@cache
def _renderer() -> RemoteFunction:
    sandbox = Sandbox(PLAIN, LIMITS, preloaded={"renderer": RENDERER})
    return RemoteFunction(sandbox, "import channel, renderer; channel.serve(renderer.render)")


def apply(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tokenize: bool = True,
    return_dict: bool = True,
    **options: Any,
) -> Any:
    """Do what the tokenizer's `apply_chat_template` does. `options`: those that the template sees.

    Raise UnsupportedModelError if the template exceeds a limit, TemplateError if it refuses the messages, ValueError if
    there is none.
    """
    chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
    template = tokenizer.get_chat_template(options.pop("chat_template", None), options.get("tools"))
    call = _renderer().call_kept(
        tokenizer.special_tokens_map | options | {"conversations": [chat], "chat_template": template}
    )
    if call.ending == "raised" and not call.detail.startswith("MemoryError"):
        raise TemplateError(call.detail.partition(": ")[2] or call.detail)
    if call.ending != "answered":
        why = f"{tokenizer.name_or_path}: its chat template exceeds a limit ({call.ending}); choose another model"
        raise UnsupportedModelError(why)
    if options.get("return_assistant_tokens_mask"):  # it needs positions in the text; this rendering ended just now
        return type(tokenizer).apply_chat_template(tokenizer, messages, return_dict=return_dict, **options)
    if not tokenize:
        return call.value
    encoded = tokenizer(call.value, add_special_tokens=False)
    return encoded if return_dict else encoded["input_ids"]


def bound_(tokenizer: Any) -> Any:
    """Let a tokenizer that was read from a folder render its template within limits. Return it."""
    tokenizer.apply_chat_template = partial(apply, tokenizer)
    return tokenizer
