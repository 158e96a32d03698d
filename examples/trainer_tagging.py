"""Token classification in three languages with Hugging Face's Trainer and GradVac.

What changes in a script of yours: the trainer's class, `tasks` and `rule`, and a column "task" in
the examples. Logging, checkpoints and `resume_from_checkpoint` include the aligner.
"""

import random
import tempfile

from transformers import BertConfig, BertForTokenClassification, TrainingArguments, set_seed

from gradvac import GradVac
from gradvac.integrations.transformers import AlignedTrainer

TASKS = ["de", "fr", "sw"]


def example(chance: random.Random, task: str) -> dict[str, object]:
    """Words below 20 are nouns (1), others verbs (0); Swahili has it the other way round."""
    words = [chance.randint(5, 39) for _ in range(8)]
    labels = [int((word < 20) != (task == "sw")) for word in words]
    return {"input_ids": words, "labels": labels, "task": task}


def trainer(folder: str, steps: int) -> AlignedTrainer:
    set_seed(0)
    chance = random.Random(0)
    config = BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=2,
    )
    arguments = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=24, learning_rate=1e-3,
        logging_steps=20, save_steps=20, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    return AlignedTrainer(
        model=BertForTokenClassification(config),
        args=arguments,
        train_dataset=[example(chance, task) for _ in range(100) for task in TASKS],
        tasks=TASKS,
        rule=GradVac(beta=1e-2),
    )


with tempfile.TemporaryDirectory() as folder:
    trainer(folder, steps=20).train()
    again = trainer(folder, steps=40)
    again.train(resume_from_checkpoint=True)
last = [entry for entry in again.state.log_history if "gradvac/similarity" in entry][-1]
print({name: round(value, 3) for name, value in last.items()})
