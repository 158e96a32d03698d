"""The command line: `gradvac`.

    gradvac demo                        everything, in a few minutes
    gradvac nmt prepare CONFIG          text -> token files
    gradvac nmt train CONFIG_OR_RUN     train, or continue a run
    gradvac nmt translate RUN --to fr   standard input -> standard output
    gradvac nmt score RUN               BLEU and chrF++
    gradvac tagging prepare CONFIG      tagged files -> windows of sub-words
    gradvac tagging pretrain CONFIG     a small multilingual encoder from plain text
    gradvac tagging train CONFIG_OR_RUN fine-tune it on all languages, or continue a run
    gradvac tagging predict RUN         standard input -> standard output
    gradvac tagging score RUN           F1 and accuracy
    gradvac similarity RUN              gradient similarity on an aligned set, at every checkpoint
    gradvac report RUN...               one page to look at
    gradvac figures RUN...              the paper's figures
    gradvac corpus write DIR            the constructed languages as text files

CONFIG is a TOML file or the name of one in `configs/nmt` or `configs/tagging`; `section.key=value`
after it replaces single settings. Mistakes of the user are told in one line, without a traceback,
with exit status 1.
"""

import typer

from gradvac.cli import corpus, demo, figures, nmt, report, similarity, tagging
from gradvac.cli._common import tells_mistakes

app = typer.Typer(
    help="Train one model on many tasks, and decide how their gradients are combined.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(nmt.app, name="nmt")
app.add_typer(tagging.app, name="tagging")
app.add_typer(corpus.app, name="corpus")
app.command("demo")(tells_mistakes(demo.demo))
app.command("similarity")(tells_mistakes(similarity.similarity))
app.command("report")(tells_mistakes(report.report))
app.command("figures")(tells_mistakes(figures.figures))


def main() -> None:
    """Run the command line."""
    app()


__all__ = ["app", "main"]
