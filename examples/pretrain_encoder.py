"""A small multilingual encoder from plain text: masked language modelling with `AlignedTrainer`.

    python examples/pretrain_encoder.py runs/encoder
    gradvac tagging train tiny model.encoder=runs/encoder

Without more, it reads the constructed languages: a minute on a CPU. Text of your own:

    python examples/pretrain_encoder.py runs/encoder --languages de fr --steps 8000 \
        --text "text.{lang}.gz" "pairs.en-{lang}.tsv#2" "pos/{lang}/train.conllu.gz"

A source is text line by line, a column of a table (by number), or tagged files (`.conll`,
`.conllu`, others with `#tags`), whose tags are left out; a language need not be in all of them.
With a rule, the languages' gradients are aligned.
"""

import argparse
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    TrainingArguments,
    set_seed,
)

from gradvac.integrations.transformers import AlignedTrainer
from gradvac.lab.recipes.common.readers import read_all_lines
from gradvac.lab.recipes.tagging import read_sentences
from gradvac.rules import RULES

SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


def read(source: str, lang: str) -> Iterator[str]:
    """The lines of a language in a source; none if there is no such file."""
    name, _, column = source.replace("{lang}", lang).partition("#")
    if not Path(name).is_file() and not name.startswith("constructed:"):
        return
    if name.startswith("constructed:") or ".conll" in name or column == "tags":
        found = read_sentences(name, lang, "train", root=Path("."), form="auto")
        yield from (" ".join(sentence.words) for sentence in found.sentences)
        return
    for _, line in read_all_lines(Path(name)):
        yield line.split("\t")[int(column) - 1] if column else line


def learn_tokenizer(lines: list[str], size: int, longest: int) -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer, as BERT's."""
    made = Tokenizer(models.WordPiece(unk_token=SPECIAL["unk"]))
    made.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    options = {"special_tokens": list(SPECIAL.values()), "show_progress": False}
    made.train_from_iterator(lines, trainers.WordPieceTrainer(vocab_size=size, **options))
    ends = [(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    names = {f"{key}_token": token for key, token in SPECIAL.items()}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=longest, **names)


def cut(tokenizer: PreTrainedTokenizerFast, lines: list[str], longest: int) -> list[list[int]]:
    """Running text in blocks of one length, so that nothing is padded."""
    text = [piece for line in tokenizer(lines)["input_ids"] for piece in line]
    return [text[start : start + longest] for start in range(0, len(text) - longest + 1, longest)]


def pretrain(arguments: argparse.Namespace) -> list[float]:
    """Train and save tokenizer and encoder; the losses on the way."""
    set_seed(arguments.seed)
    texts = {
        lang: list(dict.fromkeys(line for source in arguments.text for line in read(source, lang)))
        for lang in arguments.languages
    }
    if empty := [lang for lang, lines in texts.items() if not lines]:
        raise SystemExit(f"--text: no source has text in {', '.join(empty)}")
    lines = [line for lines in texts.values() for line in lines]
    tokenizer = learn_tokenizer(lines, arguments.vocabulary, arguments.longest)
    blocks = {lang: cut(tokenizer, lines, arguments.longest) for lang, lines in texts.items()}
    rows = [
        {"input_ids": block, "task": lang}
        for lang, found in blocks.items()
        for block in random.choices(found, k=max(map(len, blocks.values())))  # all languages alike
    ]
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=arguments.width,
            num_hidden_layers=arguments.layers,
            num_attention_heads=max(1, arguments.width // 64),
            intermediate_size=4 * arguments.width,
            max_position_embeddings=arguments.longest,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = AlignedTrainer(
            model=model,
            args=TrainingArguments(
                folder, max_steps=arguments.steps, per_device_train_batch_size=arguments.rows,
                learning_rate=arguments.lr, warmup_steps=arguments.steps // 10,
                logging_steps=max(1, arguments.steps // 8), save_strategy="no", report_to=[],
                disable_tqdm=True, seed=arguments.seed, use_cpu=not torch.cuda.is_available(),
                bf16=torch.cuda.is_available(),
            ),
            train_dataset=rows,
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
            tasks=arguments.languages,
            rule=RULES[arguments.rule](),
        )  # fmt: skip
        trainer.train()
    model.save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", default="runs/encoder", help="where it is saved")
    parser.add_argument("--languages", nargs="+", default=["qsm", "qsk", "qpl", "qpt"])
    parser.add_argument("--text", nargs="+", default=["constructed:train"], help="sources")
    parser.add_argument("--rule", default="sum", help="sum: joint training; gradvac, pcgrad, ...")
    for name, default in (("vocabulary", 1000), ("longest", 64), ("layers", 2), ("width", 64),
                          ("steps", 400), ("rows", 32), ("seed", 0), ("lr", 3e-3)):  # fmt: skip
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args(given)


if __name__ == "__main__":
    losses = pretrain(parse())
    print(f"The loss went from {losses[0]:.2f} to {losses[-1]:.2f}.")
