"""Read a policy from a TOML file; an error names the file, the rule and the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from redfence_proto import bounds
from redfence_server.access import principal
from redfence_server.access.operator_file import problems, read_toml
from redfence_server.access.policy import Effect, Policy, Rule, Verb
from redfence_server.errors import ConfigError


class _Rule(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    principals: tuple[str, ...] = Field(min_length=1)
    verbs: tuple[Verb, ...] = Field(min_length=1)
    prefix: str
    effect: Effect = Effect.ALLOW
    lock_delay_ms: int = Field(default=0, ge=0, le=bounds.TTL_MS_MAX_MOST, strict=True)

    @model_validator(mode="after")
    def _check_lock_delay(self) -> _Rule:
        if self.lock_delay_ms and (Verb.ACQUIRE not in self.verbs or self.effect is Effect.DENY):
            raise ValueError("lock_delay_ms needs the verb acquire and the effect allow; leave it out")
        return self

    @field_validator("principals")
    @classmethod
    def _check_principals(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            if text != principal.AUTHENTICATED:
                principal.parse(text)
        return texts

    @field_validator("prefix")
    @classmethod
    def _check_prefix(cls, prefix: str) -> str:
        if prefix and (problem := bounds.resource_problem(prefix)):
            raise ValueError(problem)
        return prefix


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    rules: tuple[_Rule, ...]


def load_policy(path: Path) -> Policy:
    """Return the policy of the file.

    Raises:
        ConfigError: the file cannot be read, or is no policy; the message names each wrong rule and field.
    """
    content: dict[str, Any] = read_toml(path, setting="policy_file")
    try:
        rules = _File.model_validate(content).rules
    except ValidationError as error:
        raise ConfigError(f"policy_file: {path}: {problems(error, entry='rule')}") from error
    return Policy(
        [
            Rule(
                *(frozenset(each.principals), frozenset(each.verbs), each.prefix, each.effect, number),
                each.lock_delay_ms,
            )
            for number, each in enumerate(rules, start=1)
        ]
    )
