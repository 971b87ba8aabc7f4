"""Going on with an utterance whose connection was lost: codes follow from the seed, so it is spoken again and skipped.

The client names what `started` told it, `request_id` and `seed`, and how many whole frames of audio it has.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.errors import InvalidRequest


class Resumption(BaseModel):
    """The fields of a `speak` message that goes on with an earlier one."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    from_frame: Annotated[int, Field(ge=0, lt=2**31)] = 0
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    seed: int | None = None


def parse_resumption(fields: Mapping[str, object]) -> Resumption:
    """Raises InvalidRequest that names the field; going on without the seed would be another utterance."""
    try:
        resumption = Resumption.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise InvalidRequest(f"{first['loc'][0]}: {first['msg']}.", str(first["loc"][0])) from error
    if resumption.from_frame and resumption.seed is None:
        raise InvalidRequest("seed is required with from_frame.", "seed", "missing_required_parameter")
    return resumption


async def behind(audio: AsyncGenerator[bytes, None], num_bytes: int) -> AsyncGenerator[bytes, None]:
    """`audio` without its first bytes."""
    async with aclosing(audio):
        async for part in audio:
            rest, num_bytes = part[num_bytes:], max(0, num_bytes - len(part))
            if rest:
                yield rest
