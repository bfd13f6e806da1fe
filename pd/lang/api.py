"""The words of the language. :mod:`pd.lang` exports them.

Names, order and defaults of parameters are those of SGLang's frontend.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NoReturn, overload

from pd.core.errors import UsageError
from pd.lang.backend import resolve_backend
from pd.lang.body import FunctionBody
from pd.lang.choices import token_length_normalized
from pd.lang.ir import (
    ExprList,
    Gen,
    RoleBegin,
    RoleEnd,
    SeparateReasoning,
    as_expr,
    make_select,
    make_settings,
)
from pd.lang.program import ProgramFunction
from pd.lang.settings import global_config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd.lang.choices import AnyMethod
    from pd.lang.graph import Graph
    from pd.lang.ir import Expr


@overload
def function(func: Callable[..., Any]) -> ProgramFunction: ...


@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], ProgramFunction]: ...


def function(
    func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None
) -> ProgramFunction | Callable[[Callable[..., Any]], ProgramFunction]:
    """Make a function of the language, as a decorator with or without arguments."""
    if func is not None:
        return ProgramFunction(FunctionBody(func, num_api_spec_tokens, {}))
    return lambda func: ProgramFunction(FunctionBody(func, num_api_spec_tokens, {}))


def trace(func: ProgramFunction, **arguments: Any) -> Graph:
    """Record a function as a graph, which ``show()`` prints. See :meth:`ProgramFunction.trace`."""
    return func.trace(**arguments)


def set_default_backend(backend: object) -> None:
    """Set the model of programs that name none."""
    global_config.default_backend = backend


def flush_cache(backend: object = None) -> None:
    """Empty the server's prefix cache."""
    resolve_backend(backend or global_config.default_backend).flush_cache()


def get_server_info(backend: object = None) -> dict[str, Any]:
    """Return facts about the server."""
    return resolve_backend(backend or global_config.default_backend).get_server_info()


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: AnyMethod | None = None,
    regex: str | None = None,
    json_schema: object = None,
    *,
    repetition_penalty: float | None = None,
    seed: int | None = None,
) -> Expr:
    """Have the model generate text, kept as the variable ``name``.

    Args:
        max_tokens: limit on the answer; 128 by default.
        n: number of answers. The variable is a list then, and the text goes on with the first.
        dtype: int, float, str or bool, as which the answer can be read.
        choices: the answer is one of them, as with :func:`select`.
        regex: pattern of the whole answer.
        json_schema: schema of the answer, as a text, an object, or a model of pydantic.
        repetition_penalty, seed: ours; SGLang's frontend does not have them.
    """
    if choices is not None:
        return select(name, choices, temperature or 0.0, choices_method or token_length_normalized)
    if isinstance(regex, str):  # instead of an argument of a traced function
        re.compile(regex)
    settings = make_settings(
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens,
        n=n,
        stop=stop,
        stop_token_ids=stop_token_ids,
        stop_regex=stop_regex,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        ignore_eos=ignore_eos,
        seed=seed,
        return_logprob=return_logprob,
        logprob_start_len=logprob_start_len,
        top_logprobs_num=top_logprobs_num,
        return_text_in_logprobs=return_text_in_logprobs,
        dtype=dtype,
        regex=regex,
        json_schema=json_schema,
    )
    return Gen(name, settings)


def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    *args: Any,
    **settings: Any,
) -> Expr:
    """Generate an integer. Further arguments are those of :func:`gen`."""
    settings["dtype"] = int
    return gen(name, max_tokens, None, n, stop, stop_token_ids, stop_regex, *args, **settings)


def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    *args: Any,
    **settings: Any,
) -> Expr:
    """Generate a string in quotes. Further arguments are those of :func:`gen`."""
    settings["dtype"] = str
    return gen(name, max_tokens, None, n, stop, stop_token_ids, stop_regex, *args, **settings)


def select(
    name: str | None = None,
    choices: Sequence[str] | Expr | None = None,
    temperature: float = 0.0,
    choices_method: AnyMethod = token_length_normalized,
) -> Expr:
    """Append the likeliest of several texts, kept as the variable ``name``."""
    if temperature > 1e-5:
        raise UsageError(f"select compares probabilities, so temperature {temperature} must be 0")
    return make_select(name, choices, choices_method)


def separate_reasoning(expr: object = None, model_type: str | None = None) -> Expr:
    """Keep the reasoning of generations apart, as the variables ``NAME_reasoning_content``.

    ``model_type``: a name of ``--reasoning-parser``, such as qwen3; by default, the tags of the
    model's chat template.
    """
    if expr is None:
        return ExprList(())
    given = as_expr(expr)
    items = given.items if isinstance(given, ExprList) else (given,)
    return ExprList(
        tuple(SeparateReasoning(e, model_type) if isinstance(e, Gen) else e for e in items)
    )


def _make_turn(role: str, expr: object) -> ExprList:
    content = ExprList(()) if expr is None else as_expr(expr)
    return RoleBegin(role) + content + RoleEnd(role)


def system(expr: object = None) -> Expr:
    """A turn of the system."""
    return _make_turn("system", expr)


def user(expr: object = None) -> Expr:
    """A turn of the user."""
    return _make_turn("user", expr)


def assistant(expr: object = None) -> Expr:
    """A turn of the assistant."""
    return _make_turn("assistant", expr)


def system_begin() -> Expr:
    return RoleBegin("system")


def system_end() -> Expr:
    return RoleEnd("system")


def user_begin() -> Expr:
    return RoleBegin("user")


def user_end() -> Expr:
    return RoleEnd("user")


def assistant_begin() -> Expr:
    return RoleBegin("assistant")


def assistant_end() -> Expr:
    return RoleEnd("assistant")


def image(*args: object, **kwargs: object) -> NoReturn:
    """Refuse: pd serves models of text."""
    raise UsageError("image is not supported, because pd serves models of text only")


def video(*args: object, **kwargs: object) -> NoReturn:
    """Refuse: pd serves models of text."""
    raise UsageError("video is not supported, because pd serves models of text only")


def Runtime(*args: object, **kwargs: object) -> NoReturn:
    """Refuse: programs do not start servers."""
    raise UsageError(
        "Runtime is not supported: start a server with `pd-launch unified`, and a proxy, and use "
        "RuntimeEndpoint(URL); or use the engine in this process"
    )
