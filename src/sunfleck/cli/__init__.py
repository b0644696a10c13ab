"""The `sunfleck` command. Commands are thin: they ask the API and print."""

from __future__ import annotations

import errno
import sys

import click

from sunfleck import __version__
from sunfleck.core.errors import SunfleckError

COMMANDS = {
    "demo": "sunfleck.cli.demo:demo",
    "up": "sunfleck.cli.pool:up",
    "down": "sunfleck.cli.pool:down",
    "status": "sunfleck.cli.pool:status",
    "nodes": "sunfleck.cli.pool:nodes",
    "submit": "sunfleck.cli.jobs:submit",
    "jobs": "sunfleck.cli.jobs:jobs",
    "explain": "sunfleck.cli.jobs:explain",
    "logs": "sunfleck.cli.jobs:logs",
    "cancel": "sunfleck.cli.jobs:cancel",
    "report": "sunfleck.cli.demo:report",
    "sim": "sunfleck.cli.sim:sim",
    "estimate": "sunfleck.cli.sim:estimate",
}
"""Name -> where it is. Loaded when called, so that `sunfleck --help` answers at once."""

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""What a disk says that takes no more: no fault of ours, so no traceback."""


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        import importlib

        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        found: click.Command = getattr(importlib.import_module(module), attribute)
        return found


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="sunfleck")
def cli() -> None:
    """Train neural networks on nodes that come and go.

    Start with `sunfleck demo`, or with `sunfleck up` and `sunfleck submit train.py --nodes 1:8`.
    """


def main() -> None:
    """Entry point: every expected failure is one line on stderr and an exit code."""
    try:
        code = cli.main(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except SunfleckError as error:
        click.echo(f"sunfleck: {error}", err=True)
        sys.exit(error.exit_code)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(error.exit_code)
    except click.ClickException as error:
        message = error.format_message()
        if isinstance(error, click.NoSuchOption) and error.ctx is not None and error.ctx.info_name == "submit":
            message = message.rstrip(".") + "; put the script's own options after `--`"
        click.echo(f"sunfleck: {message}", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("sunfleck: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        where = f" ({error.filename})" if error.filename else ""
        click.echo(
            f"sunfleck: {error.strerror}{where}: free space there, or choose another folder with --home", err=True
        )
        sys.exit(1)
