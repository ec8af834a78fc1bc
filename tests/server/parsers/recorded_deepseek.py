"""Outputs of DeepSeek's models, sound and broken, with the events that each stands for."""

from __future__ import annotations

from recorded_glm import NO_HEADER, NO_OPENING, Recorded, broken, call, said, thought

from longfill.server.parsers import ToolCallStart


def dsml(*invokes: str) -> str:
    return "\n\n<｜DSML｜function_calls>\n" + "\n".join(invokes) + "\n</｜DSML｜function_calls>"


def invoke(name: str, *parameters: tuple[str, str, str]) -> str:
    lines = (f'<｜DSML｜parameter name="{k}" string="{s}">{v}</｜DSML｜parameter>' for k, s, v in parameters)
    return "\n".join((f'<｜DSML｜invoke name="{name}">', *lines, "</｜DSML｜invoke>"))


LS = invoke("bash", ("command", "true", "ls"))
UNTYPED = LS.replace(' string="true"', "")
CUT = '<｜DSML｜invoke name="bash">\n<｜DSML｜parameter name="command" string="true">ls</｜DSML｜parameter>'

DSML = [
    Recorded(
        "two calls",
        "deepseek_v32",
        "Look.\n" + dsml(LS, invoke("now")),
        said("Look.\n") + call(0, "bash", '{"command": "ls"}') + call(1, "now", "{}"),
    ),
    Recorded(
        "markup and shell in values",
        "deepseek_v32",
        dsml(invoke("bash", ("command", "true", 'a </｜DSML｜ </b> "q" 2>&1'), ("timeout", "false", "5"))),
        call(0, "bash", '{"command": "a </｜DSML｜ </b> \\"q\\" 2>&1", "timeout": 5}'),
    ),
    Recorded(
        "strings stay strings, JSON stays JSON",
        "deepseek_v32",
        dsml(invoke("f", ("a", "true", "5"), ("b", "false", '{"x": [1, null]}'), ("c", "false", "no JSON"))),
        call(0, "f", '{"a": "5", "b": {"x": [1, null]}, "c": "no JSON"}'),
    ),
    Recorded("a bare invoke", "deepseek_v32", "Ok.\n\n" + LS, said("Ok.") + call(0, "bash", '{"command": "ls"}')),
    Recorded(
        "only the block's end",
        "deepseek_v32",
        LS + "\n</｜DSML｜function_calls>",
        call(0, "bash", '{"command": "ls"}'),
    ),
    Recorded("no end at all", "deepseek_v32", CUT + "\n", call(0, "bash", '{"command": "ls"}')),
    Recorded(
        "the block ends before the invoke",
        "deepseek_v32",
        CUT + "\n</｜DSML｜function_calls>",
        call(0, "bash", '{"command": "ls"}'),
    ),
    Recorded(
        "a garbled block",
        "deepseek_v32",
        "<｜DSML｜toolcalls>\n" + LS + "\n</｜DSML｜function_calls>",
        broken(0, "<｜DSML｜toolcalls>\n", NO_HEADER) + call(0, "bash", '{"command": "ls"}'),
    ),
    Recorded(
        "a parameter without its attribute",
        "deepseek_v32",
        UNTYPED + " b",
        broken(0, UNTYPED, NO_HEADER) + said(" b"),
    ),
    Recorded(
        "an attribute that says nothing",
        "deepseek_v32",
        invoke("bash", ("command", "maybe", "ls")),
        (
            ToolCallStart(0, "bash"),
            *broken(
                0,
                invoke("bash", ("command", "maybe", "ls")),
                "argument 'command' has an attribute string that is neither true nor false",
            ),
        ),
    ),
    Recorded("an empty block", "deepseek_v32", dsml(), broken(0, dsml().removeprefix("\n\n"), NO_HEADER)),
    Recorded(
        "a parameter on its own",
        "deepseek_v32",
        "ls</｜DSML｜parameter>\n</｜DSML｜invoke> b",
        said("ls") + broken(0, "</｜DSML｜parameter>\n</｜DSML｜invoke>", NO_OPENING) + said(" b"),
    ),
    Recorded(
        "thinking, then a call",
        "deepseek_v32",
        "So.</think>Now." + dsml(LS),
        thought("So.") + said("Now.") + call(0, "bash", '{"command": "ls"}'),
        reasoning=True,
        in_reasoning=True,
    ),
    Recorded(
        "a call within the thinking",
        "deepseek_v32",
        "A <｜DSML｜function_calls> block:" + dsml(LS),
        thought("A <｜DSML｜function_calls> block:\n\n") + call(0, "bash", '{"command": "ls"}'),
        reasoning=True,
        in_reasoning=True,
    ),
]


def v31(*calls: str) -> str:
    inner = "".join(f"<｜tool▁call▁begin｜>{each}<｜tool▁call▁end｜>" for each in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


JSON = [
    Recorded(
        "two calls of V3.1",
        "deepseek_v31",
        "Hi. " + v31('bash<｜tool▁sep｜>{"command": "ls }\\" </"}', "now<｜tool▁sep｜>{}"),
        said("Hi. ") + call(0, "bash", '{"command": "ls }\\" </"}') + call(1, "now", "{}"),
    ),
    Recorded(
        "V3's fenced block",
        "deepseek_v3",
        v31('function<｜tool▁sep｜>bash\n```json\n{"command": "a\\n```b"}\n```'),
        call(0, "bash", '{"command": "a\\n```b"}'),
    ),
    Recorded(
        "a bare call, cut within its end",
        "deepseek_v31",
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": [{}]}<｜tool▁ca',
        call(0, "f", '{"a": [{}]}'),
    ),
    Recorded(
        "arguments cut off",
        "deepseek_v31",
        v31('f<｜tool▁sep｜>{"a": "b') + "then",
        call(0, "f", '{"a": "b')
        + broken(0, v31('f<｜tool▁sep｜>{"a": "b').removesuffix("<｜tool▁calls▁end｜>"), "the arguments are cut off")
        + said("then"),
    ),
    Recorded(
        "arguments that are no JSON",
        "deepseek_v31",
        v31("f<｜tool▁sep｜>{a: 1}"),
        call(0, "f", "{a: 1}")
        + broken(
            0,
            v31("f<｜tool▁sep｜>{a: 1}").removesuffix("<｜tool▁calls▁end｜>"),
            "the arguments are not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
    ),
    Recorded(
        "no arguments",
        "deepseek_v31",
        v31("f<｜tool▁sep｜>"),
        broken(0, v31("f<｜tool▁sep｜>").removesuffix("<｜tool▁calls▁end｜>"), NO_HEADER),
    ),
    Recorded(
        "text after the arguments",
        "deepseek_v31",
        v31("f<｜tool▁sep｜>{} and"),
        call(0, "f", "{}")
        + broken(0, v31("f<｜tool▁sep｜>{} and").removesuffix("<｜tool▁calls▁end｜>"), "text follows the arguments"),
    ),
]

DEEPSEEK = [*DSML, *JSON]
