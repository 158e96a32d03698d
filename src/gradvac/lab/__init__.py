"""The laboratory: whole systems that are trained with the library.

    languages/     constructed languages with a known family tree, and the table of real ones
    messages.py    what the package logs, shown as plain lines
    runs/          the run folder: every file name, a manifest of checksums, one lock, scores
    training/      config, checkpoints, run log, and the one training loop
    recipes/       what a recipe adds: translation, tagging
    experiments/   sweeps, and methods compared over seeds and sentences, for any recipe

The laboratory imports the library (`gradvac`), never the reverse.
"""
