"""Fine-tuning a model of the M2M100/NLLB kind with several target languages in one batch.

`AlignedSeq2SeqTrainer` is Hugging Face's trainer with an aligned backward pass. The model here is
random and tiny, so that the example needs no download; with a real one only `model` and the
tokenizer change.
"""

import random
import tempfile

from transformers import (
    M2M100Config,
    M2M100ForConditionalGeneration,
    Seq2SeqTrainingArguments,
    set_seed,
)

from gradvac import GradVac
from gradvac.integrations.transformers import AlignedSeq2SeqTrainer

LANGUAGES = {"fr": 5, "sw": 6, "zu": 7}  # target language -> its token, put before the target
END = 2


def example(chance: random.Random, language: str) -> dict[str, object]:
    """French copies the source, the other two turn it round: a task that differs by language."""
    source = [chance.randint(10, 39) for _ in range(6)]
    target = source if language == "fr" else source[::-1]
    return {
        "input_ids": [*source, END],
        "labels": [LANGUAGES[language], *target, END],
        "task": f"en-{language}",
    }


set_seed(0)
chance = random.Random(0)
data = [example(chance, language) for _ in range(200) for language in LANGUAGES]
config = M2M100Config(
    vocab_size=40, d_model=32, encoder_layers=1, decoder_layers=1, max_position_embeddings=32,
    encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_attention_heads=2, decoder_attention_heads=2,
)  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    arguments = Seq2SeqTrainingArguments(
        folder, max_steps=60, per_device_train_batch_size=24, learning_rate=3e-3, logging_steps=30,
        gradient_accumulation_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    trainer = AlignedSeq2SeqTrainer(
        model=M2M100ForConditionalGeneration(config),
        args=arguments,
        train_dataset=data,
        tasks=[f"en-{language}" for language in LANGUAGES],
        rule=GradVac(vaccinated=["en-sw", "en-zu"]),
    )
    trainer.train()
print(trainer.aligner.tasks, trainer.alignment.similarity.mean(0))
