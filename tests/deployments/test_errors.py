import pickle
from collections.abc import Iterator

import pytest

from deployments import errors
from deployments.errors import InvalidRequest, ModelNotFound, Overloaded, PayloadTooLarge, TalkrayError


def tree(root: type[TalkrayError]) -> Iterator[type[TalkrayError]]:
    """The errors that may cross a handle; those of the command line, if it is imported, never do."""
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


def example(error: type[TalkrayError]) -> TalkrayError:
    """An error in which no attribute has its default."""
    if issubclass(error, InvalidRequest):
        return error("too long", "input", "some_code")
    return Overloaded("full", 7.5) if error is Overloaded else error("it broke")


def revived(error: TalkrayError) -> TalkrayError:
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, TalkrayError)
    return copy


@pytest.mark.parametrize("error", [*tree(TalkrayError)])
def test_every_error_survives_the_way_to_its_caller(error: type[TalkrayError]) -> None:
    raised = example(error)
    copy = revived(raised)
    assert type(copy) is error
    assert copy.args == raised.args
    assert vars(copy) == vars(raised)
    assert str(copy) == str(raised)
    assert str(copy) in ("too long", "full", "it broke")


def test_the_tree_holds_every_error_of_the_module() -> None:
    defined = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, BaseException)}
    assert set(tree(TalkrayError)) == defined


@pytest.mark.parametrize(("error", "param", "code"), [
    (InvalidRequest("no"), None, "invalid_value"), (ModelNotFound("no"), "model", "model_not_found"),
    (PayloadTooLarge("no"), None, "payload_too_large"),
])  # fmt: skip
def test_defaults_say_what_kind_of_request_error_it_is(error: InvalidRequest, param: str | None, code: str) -> None:
    copy = revived(error)
    assert isinstance(copy, InvalidRequest)
    assert (copy.param, copy.code) == (param, code)
