"""A talk in the terminal: its history, its commands, answers that fail or are cut short."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from echo_server import echo_server
from rich.console import Console

from vnext.commands.chat.conversation import Conversation, is_command, obey
from vnext.commands.chat.engine import EngineTalker
from vnext.commands.chat.talker import TalkFailed, TalkTooLong
from vnext.commands.chat.terminal import Lines, ServerTalker, Shown, chat, show, speed, talk, talker
from vnext.commands.cli import main
from vnext.options.reader import ChatCommand, parse
from vnext.runtime.protocol.sampling_params import SamplingParams, context_exceeded


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with echo_server() as running:
        yield running


def chat_command(server: ThreadingHTTPServer, *more: str) -> ChatCommand:
    return parse(["chat", "--url", f"http://127.0.0.1:{server.server_port}", *more], {})


class Typed:
    """The user's messages, one after the other; an exception among them is raised."""

    def __init__(self, *messages: str | BaseException) -> None:
        self._messages = iter(messages)

    def ask(self) -> str:
        message = next(self._messages, EOFError())
        if isinstance(message, BaseException):
            raise message
        return message


def talk_of(server: ThreadingHTTPServer, *messages: str | BaseException) -> str:
    """What the terminal shows of a talk in which the user says these messages."""
    console = Console(file=io.StringIO(), width=200)
    with talker(chat_command(server)) as other:
        talk(other, Conversation(other.title, "be brief", {"temperature": 0.0, "max_tokens": 5}), console, Typed(*messages))
    return console.file.getvalue()


def contents(body: dict) -> list[str]:
    return [message["content"] for message in body["messages"]]


def test_a_talk_carries_its_history(server: ThreadingHTTPServer) -> None:
    shown = talk_of(server, "hello [bold]there", "again", "", "/new", "third")
    assert "hello [bold]there" in shown, "what a model says is no markup"
    first, second, third = server.bodies
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == "hello [bold]there "
    assert contents(third) == ["be brief", "third"]
    assert (first["model"], first["temperature"], first["max_tokens"], first["stream"]) == ("echo", 0.0, 5, True)


def test_a_talk_with_an_engine_samples_as_the_model_s_file_says() -> None:
    sampled: list[SamplingParams] = []

    class Model:
        def get_default_sampling_params(self) -> SamplingParams:
            return SamplingParams(temperature=0.3, top_k=5)

        def stream_chat(self, messages: object, params: SamplingParams) -> Generator[str, None, int]:
            sampled.append(params)
            yield "x"
            return 1

    other = EngineTalker(Model(), "model")
    for sampling in {}, {"top_k": 9, "max_tokens": 4}:
        list(other.answer([], sampling))
    assert [(params.temperature, params.top_k, params.max_tokens) for params in sampled] == [(0.3, 5, None), (0.3, 9, 4)]


def test_no_text_of_a_model_or_a_server_commands_the_terminal(server: ThreadingHTTPServer) -> None:
    shown = talk_of(server, "\033]0;title\007 [/red] \x9b2J", "refuse", "tab\tand\nline")
    assert "\ufffd]0;title\ufffd [/red] \ufffd2J" in shown and "\033" not in shown
    assert "No such [/thing]." in shown


@pytest.mark.parametrize(("words", "sentence"), [("refuse", "No such [/thing]."), ("break", "The engine stopped.")])
def test_a_failed_answer_leaves_the_talk_going(server: ThreadingHTTPServer, words: str, sentence: str) -> None:
    assert sentence in talk_of(server, words, "next")
    assert contents(server.bodies[-1]) == ["be brief", "next"]


def test_ctrl_c_cuts_an_answer_short_and_keeps_what_came() -> None:
    def pieces() -> Generator[str, None, int]:
        yield "one "
        raise KeyboardInterrupt

    assert show(pieces(), Console(file=io.StringIO())).text == "one "


def test_ctrl_c_at_the_prompt_says_how_to_leave_and_goes_on(server: ThreadingHTTPServer) -> None:
    assert "Ctrl-D or /exit leaves" in talk_of(server, KeyboardInterrupt(), "next")
    assert contents(server.bodies[-1]) == ["be brief", "next"]


def test_commands_change_the_talk(server: ThreadingHTTPServer) -> None:
    shown = talk_of(
        server, "/help", "one", "/set temperature=0.5 top_p=0.9 max_tokens=", "/system be long", "/speed", "two words", "/exit", "never",
    )  # fmt: skip
    assert "/clear or /reset or /new" in shown and "temperature=0.5 top_p=0.9" in shown
    assert "2 tokens in" in shown
    last = server.bodies[-1]
    assert contents(last) == ["be long", "one", "one ", "two words"]
    assert (last["temperature"], last["top_p"], "max_tokens" in last) == (0.5, 0.9, False)


def test_retry_asks_the_last_question_again_and_a_failure_loses_nothing(server: ThreadingHTTPServer) -> None:
    talk_of(server, "/retry", "one", "/retry", "refuse", "/retry", "two")
    assert [contents(body)[1:] for body in server.bodies] == [
        ["one"], ["one"], ["one", "one ", "refuse"], ["one", "one ", "refuse"], ["one", "one ", "two"],
    ]  # fmt: skip


def test_a_retry_that_fails_keeps_the_answer_there_was() -> None:
    conversation = Conversation("m")
    conversation.ask("one")
    conversation.answered("first")
    assert obey(conversation, "/retry").ask == "one"
    conversation.ask("one")
    conversation.answered("")
    assert [message["content"] for message in conversation.turns] == ["one", "first"]


def test_a_talk_is_saved_once(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    shown = talk_of(server, "one", f"/save {path}", f"/save {path}", "/save", "/save /proc/none/talk.json")
    saved = json.loads(path.read_text())
    assert saved["model"] == "echo" and [message["role"] for message in saved["messages"]] == ["system", "user", "assistant"]
    assert "2 messages are in" in shown and "is there already: name another file" in shown
    assert "name a file, as /save talk.json" in shown and "cannot be written" in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("/set temperature=hot", "temperature is 'hot': it must be a number"),
        ("/set temperature=-1", "temperature is -1.0: it must lie between"),
        ("/set heat=1", "/set takes name=value, and the names are temperature"),
        ("/set stop='", "No closing quotation"),
        ("/hlep", "there is no command /hlep: did you mean /help?"),
        ("/xyzzy", "there is no command /xyzzy: /help lists all commands."),
        ("/system", "system: none"),
    ],
)
def test_a_command_that_cannot_be_obeyed_is_one_sentence(words: str, said: str) -> None:
    assert said in obey(Conversation("m"), words).say


def test_a_path_is_for_the_model() -> None:
    assert not is_command("/usr/bin/env is what?") and not is_command("a /help") and is_command("/help") and is_command("/?")


def test_the_speed_of_an_answer() -> None:
    assert speed(Shown("a", 11, 0.5, 1.5)) == "11 tokens in 1.50 s, the first piece after 0.50 s, 10.0 tokens/s after that"
    assert speed(Shown("a", 0, 0.5, 1.5)) == "1.50 s, the first piece after 0.50 s"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["one"], "one"),
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (['"""', "one", "  two", '"""'], "one\n  two"),
        (['"""one', 'two"""'], "one\ntwo"),
        (['"""one"""'], "one"),
        (["   "], ""),
    ],
)
def test_a_message_may_have_several_lines(monkeypatch: pytest.MonkeyPatch, typed: list[str], message: str) -> None:
    given = iter(typed)
    monkeypatch.setattr("builtins.input", lambda prompt: next(given))
    assert Lines("", "").ask() == message


def test_a_python_without_readline_talks_too(root: Path, server: ThreadingHTTPServer) -> None:
    code = (
        "import sys; sys.modules['readline'] = None; from vnext.commands.cli import main; "
        f"raise SystemExit(main(['chat', '--url', 'http://127.0.0.1:{server.server_port}']))"
    )
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, input=b"hello \xff\n", capture_output=True, timeout=60, env=strict)
    assert (ran.returncode, ran.stderr) == (0, b"") and "hello \ufffd" in ran.stdout.decode(), "what is no UTF-8 ends no talk"


def test_no_server_there(capsys: pytest.CaptureFixture[str]) -> None:
    command = parse(["chat", "--url", "http://127.0.0.1:1"], {})
    with pytest.raises(TalkFailed, match="is a server running there"):
        talker(command)
    assert chat(command) == 2
    assert capsys.readouterr().err.startswith("vnext chat: http://127.0.0.1:1 cannot be reached (Connection refused): is")


def test_a_model_that_is_not_there_is_said_by_the_command_as_it_was_typed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for word in ("run", "chat"):
        assert main([word, "./none", "--models-dir", str(tmp_path)]) == 2
        assert capsys.readouterr().err == (
            f"vnext {word}: there is no folder './none'; give an existing folder or a hub id such as owner/name.\n"
        )


def test_end_of_input_ends_a_talk_with_an_own_engine(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vnext.commands.cli", "chat", "--executor", "inproc", "--threads", "1", "--max-tokens", "4"]
    ran = subprocess.run(
        [*command, "--log-dir", str(tmp_path)], cwd=root, input="/speed\nWhat is Python?\n", capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "the demo model" in ran.stdout and "4 tokens in" in ran.stdout


class Small:
    """A talker whose context has ten words; each answer has as many as it may."""

    title, context = "small", 10

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], object]] = []

    def answer(self, messages: list[dict[str, str]], sampling: dict[str, object]) -> Generator[str, None, int]:
        words, most = sum(len(message["content"].split()) for message in messages), sampling.get("max_tokens")
        self.asked.append(([message["content"] for message in messages], most))
        if words + (most or 1) > self.context:
            raise TalkTooLong("too long")
        yield "word " * (most or self.context - words)
        return most or self.context - words


def test_an_answer_leaves_room_and_a_chat_goes_on_when_its_beginning_no_longer_fits() -> None:
    model, file = Small(), io.StringIO()
    talk(model, Conversation("small", "be brief"), Console(file=file), Typed("one two three", "four five", "six"))
    assert model.asked[0] == (["be brief", "one two three"], 2)
    assert model.asked[1:3] == [(["be brief", "one two three", "word word ", "four five"], most) for most in (2, None)]
    assert model.asked[-1][0][0] == "be brief" and model.asked[-1][0][-1] == "six" and len(model.asked[-1][0]) < 6
    assert "messages no longer fit and were left out: /new begins anew" in file.getvalue() and "error" not in file.getvalue()


def test_a_question_that_is_too_long_alone_is_an_error_and_not_an_answer() -> None:
    model, file = Small(), io.StringIO()
    talk(model, Conversation("small"), Console(file=file), Typed("word " * 11, "one"))
    assert "\nerror: too long\nit   word word" in "\n" + file.getvalue().partition("\n")[2]
    assert model.asked[-1] == (["one"], 2)


def test_an_engine_and_a_server_say_what_is_too_long(server: ThreadingHTTPServer) -> None:
    class Model:
        def get_default_sampling_params(self) -> SamplingParams:
            return SamplingParams()

        def stream_chat(self, messages: object, params: SamplingParams) -> Generator[str, None, int]:
            raise context_exceeded(10, "you asked for 11", "prompt", "messages")
            yield ""

    with pytest.raises(TalkTooLong, match="maximum context length is 10"):
        list(EngineTalker(Model(), "m").answer([], {}))
    other = ServerTalker(chat_command(server))
    assert other.context == 0
    with pytest.raises(TalkTooLong, match="This is long"):
        list(other.answer([{"role": "user", "content": "long"}], {}))
