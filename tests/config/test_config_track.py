"""Settings of what a run records and whom it tells."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gristmill.base.errors import UserError
from gristmill.config.load import dump_run, load_text
from gristmill.config.resolve import resolve
from gristmill.config.rules import config_warnings
from gristmill.config.schema import RunConfig
from gristmill.config.track import check_address, looks_secret, parse_bytes, without_address

RUN = """
name = "mill"
[model]
layers = 2
heads = 2
width = 16
context = 24
[data]
paths = "tokens"
[train]
until = "12 steps"
batch = 4
"""


def load(*lines: str) -> RunConfig:
    return load_text(RUN + "\n".join(lines), place="run.toml")


@pytest.fixture
def problem() -> Callable[..., str]:
    def of(*lines: str) -> str:
        with pytest.raises(UserError) as caught:
            load(*lines)
        return str(caught.value)

    return of


def test_nobody_is_told_by_default_and_hosts_are_sampled() -> None:
    config = load()
    assert config.alert is None
    assert config.track.system == "15s"
    assert "[alert]" not in dump_run(config)


def test_everything_survives_being_written() -> None:
    config = load(
        "[track]",
        "system = false",
        '[track.trackio]\nproject = "mill"\nspace = "me/curves"',
        '[alert]\ncommand = ["notify", "$HOME"]\nurl = "env:HOOK"\nloss_above = 4.0',
        'no_progress = false\ndisk_below = "1.5 TiB"\ndone = false\nstraggler = true',
    )
    assert load_text(dump_run(config), place="again") == config
    assert config.alert is not None
    assert config.alert.command == ("notify", "$HOME")
    assert config.alert.no_progress is False
    assert config.track.system is False


def test_settings_on_the_command_line() -> None:
    settings = ("track.system=false", 'alert.command="echo told"', "alert.loss_above=3")
    config = load_text(RUN, settings, place="run.toml")
    assert config.track.system is False
    assert config.alert is not None
    assert (config.alert.command, config.alert.loss_above) == ("echo told", 3.0)
    assert config.alert.diverged
    assert not config.alert.straggler


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("[alert]", "alert: nobody is told\n    set alert.command, alert.url, or both"),
        ("[alert]\nloss_above = 3.0", "nobody is told"),
        ("[alert]\ncommand = []", "alert.command: must be a line for the shell, or a list"),
        ("[alert]\ncommand = [7]", "alert.command: must be a line for the shell, or a list"),
        ('[alert]\ncommand = " "', "alert.command: must name a command"),
        ('[alert]\nurl = "hooks.slack.com/x"', "alert.url: must be an address that begins with"),
        ('[alert]\nurl = "file:///etc/passwd"', "alert.url: must be an address that begins with"),
        ('[alert]\nurl = "env:"', 'alert.url: must name an environment variable after "env:"'),
        ('[alert]\nurl = "env:A-B"', 'alert.url: must name an environment variable after "env:"'),
        ('[alert]\ncommand = "x"\nno_progress = "10"', "alert.no_progress: must be a time such"),
        ('[alert]\ncommand = "x"\nno_progress = "0s"', 'alert.no_progress: must be at least "1s"'),
        ('[alert]\ncommand = "x"\nno_progress = true', "alert.no_progress: must be a time such"),
        ('[alert]\ncommand = "x"\ndisk_below = "10"', "alert.disk_below: must be a size such as"),
        ('[alert]\ncommand = "x"\ndisk_below = 10', "alert.disk_below: must be a size such as"),
        ('[alert]\ncommand = "x"\ndisk_below = "0 GB"', "alert.disk_below: must be more than 0"),
        ('[alert]\ncommand = "x"\nloss_over = 3.0', "loss_above"),
        ('[track]\nsystem = "0.5s"', 'track.system: must be at least "1s"'),
        ("[track]\nsystem = 15", 'track.system: must be a time such as "15s" or "10m", or false'),
        ('[track.trackio]\nproject = " "', "track.trackio.project"),
        ('[track.trackio]\nspace = "x"', "track.trackio.project"),
    ],
)
def test_mistakes(lines: str, said: str, problem: Callable[..., str]) -> None:
    assert said in problem(lines)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1 B", 1), ("10 GB", 10**10), ("10gb", 10**10), ("1.5 TiB", 3 * 2**39), ("2KiB", 2048)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "10", "10 GX", "-1 GB", "1 2 GB", "10 GB later"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="must be a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        ("env:HOOK", False),
        ("http://localhost:8000/alerts", False),
        ("https://user:pass@host/x", True),
        ("https://token@host/x", True),
        ("https://host/x?key=1", True),
        ("https://hooks.slack.com/services/T00000000/B00000000/abcdefghijklmnopqrstuvwx", True),
    ],
)
def test_addresses_that_hold_passwords(url: str, secret: bool) -> None:
    assert looks_secret(url) is secret
    config = load(f'[alert]\nurl = "{url}"')
    warnings = [
        text for text in config_warnings(config, resolve(config, vocab=256)) if "alert.url" in text
    ]
    assert bool(warnings) is secret
    assert not any("pass@" in text or "abcdef" in text for text in warnings)


@pytest.mark.parametrize(
    "url", ["https://", "http://host:port/", "http://host/a b", "http://h\u00f6st/", "//host", ""]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="must be an address"):
        check_address(url)


def test_a_mistake_in_an_address_is_told_without_it(problem: Callable[..., str]) -> None:
    assert "secret" not in problem('[alert]\nurl = "htp://user:secret@host"')


def test_a_run_file_can_be_shown_without_its_address() -> None:
    secret = load(
        '[track.wandb]\nproject = "p"',
        '[alert]\nurl = "https://user:secret@host/x?y=\\"z\\""\ncommand = ["a", "b"]\ndone = false',
    )
    shown = without_address(dump_run(secret))
    assert "secret" not in shown
    changed = {"url": "https://hidden"}
    again = load_text(shown.replace("(not shown)", "https://hidden"), place="shown")
    assert secret.alert is not None
    assert again == secret.model_copy(update={"alert": secret.alert.model_copy(update=changed)})
    open_ones = load('[alert]\nurl = "env:HOOK"')
    assert without_address(dump_run(open_ones)) == dump_run(open_ones)
    assert without_address(dump_run(load())) == dump_run(load())
