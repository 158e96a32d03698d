"""The command line: `gradvac`.

    gradvac demo                        everything, in a few minutes
    gradvac nmt prepare CONFIG          text -> token files
    gradvac nmt train CONFIG_OR_RUN     train, or continue a run
    gradvac nmt translate RUN --to fr   standard input -> standard output
    gradvac nmt score RUN               BLEU and chrF++
    gradvac nmt export RUN DIR          the model for Hugging Face or CTranslate2
    gradvac tagging prepare CONFIG      tagged files -> windows of sub-words
    gradvac tagging train CONFIG_OR_RUN fine-tune it on all languages, or continue a run
    gradvac tagging predict RUN         standard input -> standard output
    gradvac tagging score RUN           F1 and accuracy
    gradvac similarity RUN              gradient similarity on an aligned set, at every checkpoint
    gradvac advise RUN...               which tasks should learn together; runs that check it
    gradvac report RUN...               one HTML page about runs
    gradvac figures RUN...              the paper's figures
    gradvac sweep CONFIG                many runs: grids, methods, seeds; several at a time
    gradvac compare RUN...              what is clear, suggestive, not shown of methods
    gradvac corpus write DIR            the constructed languages as text files

CONFIG is a TOML file or the name of one in `configs/nmt` or `configs/tagging`; `section.key=value`
after it overrides single settings. A user's mistake is reported in one line, without a traceback,
with exit status 1.

    commands.py     the commands under their names; a file each
    common.py       options, output, where configs are, how mistakes are reported

A command imports what it needs when it runs: `--help` is fast, and a missing extra is one line.
"""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from gradvac.cli.commands import app
        from gradvac.cli.common import tolerate_terminal

        tolerate_terminal()
        app()
    except KeyboardInterrupt:  # while the commands themselves are being imported
        sys.exit(130)
    except ModuleNotFoundError as error:
        if (error.name or "gradvac").startswith("gradvac"):
            raise
        from gradvac.utils.hints import install_line

        sys.exit(
            f"error: the command line needs {error.name}, which is not installed; "
            f"{install_line('all')}."
        )


__all__ = ["main"]
