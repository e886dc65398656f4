"""Arguments of a server's tool, checked against the JSON schema that the server gave.

The schema is foreign data: nothing is fetched for it, and its regular expressions are not run (one
that backtracks for ever would hold the whole session). The server checks its arguments itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ConfigDict, model_validator

from etude.agent.tools.tool import Arguments

Check = Callable[[Mapping[str, Any]], str]
"""What is wrong with arguments, or ''."""


class ServerArguments(Arguments):
    """Any arguments; `model_extra` holds them. A subclass per tool knows its schema."""

    model_config = ConfigDict(frozen=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _checked(cls, value: Any) -> Any:
        fault = cls.fault(value)
        if fault:
            raise ValueError(fault)
        return value

    @classmethod
    def fault(cls, arguments: Mapping[str, Any]) -> str:
        """See `Check`."""
        return ""


def arguments_for(check: Check) -> type[ServerArguments]:
    """The argument model of one tool."""

    class Checked(ServerArguments):
        @classmethod
        def fault(cls, arguments: Mapping[str, Any]) -> str:
            return check(arguments)

    return Checked


def checker(schema: dict[str, Any]) -> Check:
    """A check by a schema. Raises ValueError when it is no JSON schema."""
    from jsonschema import SchemaError
    from jsonschema.exceptions import best_match
    from jsonschema.validators import extend, validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    base = validator_for(schema)
    try:
        base.check_schema(schema)
    except (SchemaError, RecursionError) as error:
        raise ValueError(getattr(error, "message", "it is nested too deeply")) from error

    def skip(*_: Any) -> Iterator[Any]:
        return iter(())

    def guarded(keyword: str) -> Callable[..., Iterator[Any]]:
        inner = base.VALIDATORS.get(keyword, skip)

        def check_keyword(validator: Any, value: Any, instance: Any, part: Any) -> Iterator[Any]:
            # What else is allowed depends on the names that the patterns match.
            if "patternProperties" not in part:
                yield from inner(validator, value, instance, part) or ()

        return check_keyword

    others = ("additionalProperties", "unevaluatedProperties")
    replaced = {keyword: guarded(keyword) for keyword in others if keyword in base.VALIDATORS}
    tame = extend(base, {"pattern": skip, "patternProperties": skip, **replaced})
    validator = tame(schema, registry=Registry())

    def check(arguments: Mapping[str, Any]) -> str:
        try:
            error = best_match(validator.iter_errors(dict(arguments)))
        except Unresolvable as unresolved:
            return f"the server's schema refers to {unresolved.ref}, which is not in it"
        except RecursionError:
            return "the server's schema cannot be applied"
        if error is None:
            return ""
        where = ".".join(str(part) for part in error.absolute_path)
        return f"{where}: {error.message}"[:500] if where else error.message[:500]

    return check
