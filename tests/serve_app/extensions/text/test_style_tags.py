"""Style tags in a text: which words have which style, what is reported, and that no tag is read aloud."""

import pytest

from serve_app.extensions.text.spoken_text import TextReader, TextRules, read
from serve_app.extensions.text.style_tags import MAX_LABEL_CHARS, MAX_SPANS, StyleRules, as_instructions

FOLLOWER = StyleRules("all")
V3 = StyleRules("all", any_bracket=True)
EMBEDDED = StyleRules("manners")
TAKES = StyleRules("nothing", ("neutral", "whispering"))
NOTHING = StyleRules()
SLOW, FAST, QUIET = "Speak slowly.", "Speak faster, please.", "Use a quiet voice."
SAD, CALM = '<emotion value="sad"/>', '<expr type="expression" label="calm"/>'
CUE, OPEN = "direction in brackets", "style tag that is not closed"
LONG = "x" * (MAX_LABEL_CHARS + 1)

# The text, the rules, its spans with their styles, what is reported.
TABLE: dict[str, tuple[str, StyleRules, list[tuple[str, str]], dict[str, int]]] = {
    # Spellings.
    "livekit": (f"A. {CALM} B.", FOLLOWER, [("A.", ""), ("B.", "calm")], {}),
    "livekit-phrase": ('<expr label="warm, quiet"/> B.', FOLLOWER, [("B.", "warm, quiet")], {}),
    "livekit-prosody": ('<expr type="prosody" label="whisper">B</expr> c', EMBEDDED, [("B", QUIET), ("c", "")], {}),
    "livekit-soft": ('<expr type="prosody" label="soft"/>B', EMBEDDED, [("B", QUIET)], {}),
    "livekit-sound": ('A <expr type="sound" label="laugh"/> b', FOLLOWER, [("A b", "")], {"tag sound": 1}),
    "cartesia": (f"{SAD} A. <emotion value='angry' /> B.", FOLLOWER, [("A.", "sad"), ("B.", "angry")], {}),
    "volume-as-before": ('<volume ratio="2"/> a <volume ratio="1"/> b', FOLLOWER, [("a", "loud"), ("b", "")], {}),
    "volume": ('a <volume ratio="0.5"/> b <volume ratio="1"/> c', EMBEDDED, [("a", ""), ("b", QUIET), ("c", "")], {}),
    "elevenlabs": ("[whispers] A. [excited] B.", FOLLOWER, [("A.", "whispers"), ("B.", "excited")], {}),
    "several-words": ("[Very sad and slow] A.", FOLLOWER, [("A.", "Very sad and slow")], {}),
    "emphasis": ("A <emphasis>b</emphasis>, c", FOLLOWER, [("A", ""), ("b,", "emphasis"), ("c", "")], {}),
    "emphasis-level": ('<emphasis level="strong">b</emphasis>', FOLLOWER, [("b", "strong emphasis")], {}),
    "prosody": ('<prosody volume="x-soft" pitch="+2st">B</prosody>', FOLLOWER, [("B", "very quiet, high pitch")], {}),
    "prosody-empty": ('A <prosody volume="soft"/> b', FOLLOWER, [("A b", "")], {"prosody volume": 1}),
    "azure": ('<mstts:express-as style="sad">B</mstts:express-as>', FOLLOWER, [("B", "sad")], {}),
    # What each model and voice makes of them.
    "embedded": ("[slowly] A [rapid] b [hushed] c", EMBEDDED, [("A", SLOW), ("b", FAST), ("c", QUIET)], {}),
    "embedded-other": (f"[slow] A. {SAD} B.", EMBEDDED, [("A.", SLOW), ("B.", "")], {"tag emotion": 1}),
    "embedded-neutral": ("[slow] A. [neutral] B.", EMBEDDED, [("A.", SLOW), ("B.", "")], {}),
    "embedded-not": ('<emotion value="not too fast"/> A.', EMBEDDED, [("A.", "")], {"tag emotion": 1}),
    "take": ("A [Whispers softly] b [neutral] c", TAKES, [("A", ""), ("b", "whispering"), ("c", "neutral")], {}),
    "no-take": (f"[whisper] A {CALM} b", TAKES, [("A", "whispering"), ("b", "")], {"tag expr": 1}),
    "no-effect": (f"{SAD} A [calm] b <emphasis>c</emphasis>", NOTHING, [("A b c", "")], {
        "tag emotion": 1, CUE: 1, "tag emphasis": 1,
    }),
    # Where a tag ends.
    "closing-bracket": ("A [sad] b [/sad]. C", FOLLOWER, [("A", ""), ("b.", "sad"), ("C", "")], {}),
    "closing-alone": (f"{SAD} A </emotion> b", FOLLOWER, [("A", "sad"), ("b", "")], {}),
    "unclosed": ('A <emotion value="sad">b. C', FOLLOWER, [("A", ""), ("b. C", "sad")], {}),
    "nested": (
        '<emotion value="sad">A <emotion value="happy">b</emotion> c</emotion> d',
        FOLLOWER, [("A", "sad"), ("b", "happy"), ("c", "sad"), ("d", "")], {},
    ),
    "nested-kinds": (
        '<emotion value="sad">A <prosody volume="loud">b</prosody> c</emotion>',
        FOLLOWER, [("A", "sad"), ("b", "sad, loud"), ("c", "sad")], {},
    ),
    "nested-volumes": (
        '<prosody volume="loud" pitch="low">A <prosody volume="medium">b</prosody> <prosody volume="soft">c',
        FOLLOWER,
        [("A", "loud, low pitch"), ("b", "low pitch"), ("c", "quiet, low pitch")],
        {},
    ),
    "standing-inside": ('<emotion value="sad">A [calm] b</emotion> c', FOLLOWER, [
        ("A", "sad"), ("b", "calm"), ("c", ""),
    ], {}),
    "crossing": (
        '<emotion value="sad">A <expr label="calm">b</emotion> c</expr> d',
        FOLLOWER, [("A", "sad"), ("b c", "calm"), ("d", "")], {},
    ),
    "paragraphs": (f"{SAD} A.\n\nB.", FOLLOWER, [("A.", "sad"), ("B.", "sad")], {}),
    # What is no tag, or no whole one.
    "no-tags": ("See [1], [sic], [name], list[0] and [x].", FOLLOWER, [
        ("See [1], [sic], [name], list[0] and [x].", ""),
    ], {}),
    "no-tags-v3": ("See [1], [sic] and [x].", V3, [("See [1], [sic] and [x].", "")], {}),
    "link": ("[calm](http://x.y/z) [sad](a.md)", FOLLOWER, [("calm sad", "")], {"link target": 2}),
    "no-link": ("[calm][sad](really) A", FOLLOWER, [("(really) A", "sad")], {f"{CUE} without text": 1}),
    "any-label": ("[strong French accent] A [Tom] b", V3, [("A", "strong French accent"), ("b", "Tom")], {}),
    "unknown": ('<emotion value="zesty"/> A', FOLLOWER, [("A", "zesty")], {}),
    "bracket-in-quotes": ('<emotion value="a>b"/> A', FOLLOWER, [("A", "a>b")], {}),
    "no-label": ("<emotion/> A", FOLLOWER, [("A", "")], {"tag emotion": 1}),
    "cut-off-name": ("A <emo", FOLLOWER, [("A", "")], {OPEN: 1}),
    "cut-off-value": ('A <emotion value="sa', FOLLOWER, [("A", "")], {OPEN: 1}),
    "cut-off-bracket": ("A [whispers", FOLLOWER, [("A", "")], {OPEN: 1}),
    "no-end": ('A <emotion value="sad" b.', FOLLOWER, [("A b.", "")], {OPEN: 1}),
    "no-quote": ('A <emotion value="sad>b.', FOLLOWER, [("A b.", "")], {OPEN: 1}),
    # Limits.
    "longest": (f'<emotion value="{LONG[1:]}"/> b', FOLLOWER, [("b", LONG[1:])], {}),
    "too-long": (f'{SAD} A <emotion value="{LONG}"/> b', FOLLOWER, [("A", "sad"), ("b", "")], {
        f"style label beyond {MAX_LABEL_CHARS} characters": 1,
    }),
    "far-too-long": (f'A <expr label="{LONG * 20}"/> b', FOLLOWER, [("A b", "")], {
        f"style label beyond {MAX_LABEL_CHARS} characters": 1,
    }),
    "too-many": (
        "".join(f'<emotion value="e{number}"/>a ' for number in range(MAX_SPANS + 2)),
        FOLLOWER,
        [*(("a", f"e{number}") for number in range(MAX_SPANS)), ("a a", "")],
        {f"style tag beyond {MAX_SPANS} spans": 2},
    ),
    # Without words.
    "at-the-end": ("A. [sad]", FOLLOWER, [("A.", "")], {f"{CUE} without text": 1}),
    "only": (SAD, FOLLOWER, [], {"tag emotion without text": 1}),
    "replaced": (f"{SAD} {CALM} A", FOLLOWER, [("A", "calm")], {"tag emotion without text": 1}),
    "empty": ('<emotion value="sad"></emotion>A', FOLLOWER, [("A", "")], {"tag emotion without text": 1}),
}  # fmt: skip
WELL_FORMED = (
    *("livekit", "cartesia", "elevenlabs", "emphasis", "prosody"),
    *("nested", "any-label", "at-the-end", "too-long"),
)


def in_parts(text: str, rules: TextRules, *parts: str) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """As the whole text has them, of a text that comes in parts."""
    reader, spans, spoken, style = TextReader(rules), [], "", ""
    pieces = [piece for part in parts for piece in reader.feed(part, is_last=False)]
    for piece in [*pieces, *reader.feed("", is_last=True)]:
        if piece.is_border:
            spans += [(spoken.strip(), style)] if spoken.strip() else []
            spoken, style = "", style if piece.style is None else piece.style
        else:
            spoken += piece.spoken
    return spans + ([(spoken.strip(), style)] if spoken.strip() else []), dict(reader.left_out)


@pytest.mark.parametrize("name", TABLE)
def test_words_have_the_style_of_the_tags_before_them(name: str) -> None:
    text, styles, spans, reported = TABLE[name]
    rules = TextRules("auto", 0.5, styles=styles)
    whole = read(text, rules)
    assert [(span.text, span.style) for span in whole.spans if span.text] == spans
    assert dict(whole.left_out) == reported
    cuts = range(0, len(text), max(1, len(text) // 200))
    for parts in (text, *((text[:cut], text[cut:]) for cut in cuts)):
        assert in_parts(text, rules, *parts) == (spans, reported), parts


@pytest.mark.parametrize("name", WELL_FORMED)
def test_tags_inside_ssml(name: str) -> None:
    text, styles, spans, reported = TABLE[name]
    whole = read(f"<speak>{text}</speak>", TextRules("ssml", styles=styles))
    assert [(span.text.removesuffix("."), span.style) for span in whole.spans] == [
        (words.removesuffix("."), style) for words, style in spans
    ]
    assert dict(whole.left_out) == reported


def test_a_text_without_markup_has_only_vendors_tags() -> None:
    text = f'*A* {SAD} b [calm] c [laughs] <emphasis>d</emphasis> <expr type="break" label="1s"/>[x](y)'
    spans = [(span.text, span.style) for span in read(text, TextRules("none", styles=FOLLOWER)).spans]
    assert spans == [("*A*", ""), ("b", "sad"), ("c [laughs] <emphasis>d</emphasis>", "calm"), ("[x](y)", "calm")]


def test_a_style_adds_to_the_instructions_of_the_request() -> None:
    assert as_instructions(None, "calm") == as_instructions("", "calm") == "calm"
    assert as_instructions("Read like a host.", "calm") == "Read like a host. calm"
