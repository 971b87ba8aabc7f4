"""ElevenLabs' pronunciation dictionaries, stored as lexicons with aliases. Requests select a dictionary by its ID."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.errors import InvalidRequest
from serve_app.api.parsing.client_input import read_object, text_of
from serve_app.api.parsing.forms import read_form
from serve_app.api.responses.listing import Paging, json_in_thread
from serve_app.api.speech_service import SpeechService
from serve_app.extension import Charge, Dialect, Route
from serve_app.extensions.text.lexicon import Lexicon, from_pls, to_pls
from serve_app.extensions.voices.library import voices_of
from serve_app.extensions.voices.stored_voice import StoredLexicon

Json = dict[str, object]

_BASE = "/v1/pronunciation-dictionaries"
_ONE = f"{_BASE}/{{dictionary_id}}"


async def add_from_rules(service: SpeechService, request: Request) -> Response:
    """Store a dictionary of `rules` with a `name`."""
    fields = await read_object(request)
    made = StoredLexicon.named(text_of(fields, "name"), _words(fields.get("rules")))
    return JSONResponse(_entry(await voices_of(service).keep(made, {})))


async def add_from_file(service: SpeechService, request: Request) -> Response:
    """Store a dictionary from a PLS `file`."""
    form = await read_form(request)
    files = form.files_of("file")
    if len(files) != 1:
        raise InvalidRequest("file is required. Send one PLS lexicon.", "file", "missing_required_parameter")
    made = StoredLexicon.named(form.required("name"), from_pls(files[0].data, "file"))
    return JSONResponse(_entry(await voices_of(service).keep(made, {})))


async def add_rules(service: SpeechService, request: Request, dictionary_id: str) -> Response:
    """Add `rules`, which replace existing rules with the same spelling."""
    rules = _words((await read_object(request)).get("rules"))
    return await _changed(service, dictionary_id, lambda words: words | rules)


async def remove_rules(service: SpeechService, request: Request, dictionary_id: str) -> Response:
    """Delete the rules with the spellings in `rule_strings`."""
    gone = (await read_object(request)).get("rule_strings")
    if not isinstance(gone, list):
        raise InvalidRequest("rule_strings must be a list of strings.", "rule_strings")
    return await _changed(
        service, dictionary_id, lambda words: {word: said for word, said in words.items() if word not in gone}
    )


async def _changed(
    service: SpeechService, dictionary_id: str, change: Callable[[dict[str, str]], dict[str, str]]
) -> Response:
    lexicon = await voices_of(service).get_other(StoredLexicon, dictionary_id)
    changed = await voices_of(service).change(lexicon, lambda old: old.with_words(change(old.words)))
    return JSONResponse(_entry(changed))


async def show(service: SpeechService, dictionary_id: str) -> Json:
    """Return a dictionary with its rules."""
    lexicon = await voices_of(service).get_other(StoredLexicon, dictionary_id)
    rules = [{"string_to_replace": word, "type": "alias", "alias": said} for word, said in lexicon.words.items()]
    return {**_entry(lexicon), "rules": rules}


async def list_all(service: SpeechService, page_size: str = "", cursor: str = "") -> Response:
    """Return all dictionaries, or one page of them if the client sends a `page_size`."""
    known = await voices_of(service).all_of(StoredLexicon)
    most = service.resolver.voices.most
    page, more = Paging(page_size, cursor, names=("page_size", "cursor"), default=most, most=most).cut(known)
    about = {"has_more": more is not None, "next_cursor": more}
    return await json_in_thread(lambda: {"pronunciation_dictionaries": list(map(_entry, page)), **about})


async def download(service: SpeechService, dictionary_id: str, version_id: str) -> Response:
    """Return the newest version of a dictionary as a PLS file."""
    lexicon = await voices_of(service).get_other(StoredLexicon, dictionary_id)
    if version_id != lexicon.version:
        raise InvalidRequest(f"version_id must be {lexicon.version}, the newest version.", "version_id")
    return Response(to_pls(lexicon.words.items(), "en"), media_type="application/pls+xml")


def _words(rules: object) -> dict[str, str]:
    """Return the respelling of each word. Raises InvalidRequest for invalid rules, such as rules with phonemes."""
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise InvalidRequest("rules must be a list of objects.", "rules")
    words: dict[str, str] = {}
    for rule in rules:
        word, said = rule.get("string_to_replace"), rule.get("alias")
        if rule.get("type") == "phoneme":
            reason = "phonemes are not supported. Send an alias"
            raise InvalidRequest(f"rules: {str(word)[:80]!r}: {reason}.", "rules", "phonemes_not_supported")
        if not isinstance(word, str) or not isinstance(said, str):
            raise InvalidRequest("rules: each rule must have string_to_replace and alias, as strings.", "rules")
        words[word] = said
    return Lexicon.checked(words, "rules").words


def _entry(lexicon: StoredLexicon) -> Json:
    version = {"version_id": lexicon.version, "latest_version_id": lexicon.version}
    counts = {"version_rules_num": len(lexicon.words), "latest_version_rules_num": len(lexicon.words)}
    made = {"created_by": lexicon.owner, "creation_time_unix": lexicon.created_at, "description": None}
    return {"id": lexicon.id, "name": lexicon.name, **version, **counts, **made, "permission_on_resource": "admin"}


DIALECT = Dialect(
    "ElevenLabs dictionaries",
    routes=(
        Route(f"POST {_BASE}/add-from-rules", add_from_rules, "Store a pronunciation dictionary"),
        Route(f"POST {_BASE}/add-from-file", add_from_file, "Store a pronunciation dictionary from a PLS file"),
        Route(f"POST {_ONE}/add-rules", add_rules, "Add rules to a dictionary"),
        Route(f"POST {_ONE}/remove-rules", remove_rules, "Remove rules from a dictionary"),
        Route(f"GET {_BASE}", list_all, "List pronunciation dictionaries", charge=Charge.STREAM),
        Route(f"GET {_ONE}", show, "Show a pronunciation dictionary", charge=Charge.STREAM),
        Route(
            f"GET {_ONE}/{{version_id}}/download", download, "Download a dictionary as a PLS file", charge=Charge.STREAM
        ),
    ),
    heading="ElevenLabs",
)
