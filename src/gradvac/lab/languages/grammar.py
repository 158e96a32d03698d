"""Grammar: the parameters in which languages differ.

A grammar is a plain record of choices, so that two languages can be compared choice by choice:
their typological distance is the share of parameters on which they differ.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

Side = Literal["before", "after"]


@dataclass(frozen=True)
class Grammar:
    """How a language builds phrases, words and sentences.

    Attributes:
        order: Order of subject, object and verb.
        recipient: Side of the object on which the recipient stands.
        adjective: Side of the noun on which adjectives stand; so for the next three.
        numeral: Number words.
        genitive: Owners.
        relative: Relative clauses.
        adposition: "before" is a preposition, "after" a postposition, "affix" a local case.
        subordinator: Side of the clause on which "that" and "because" stand; with "after", the
            clause moves in front of the verb or of the main clause.
        time: Where time words stand.
        place: Where places stand.
        morphology: "isolating" words never change, "agglutinating" words string affixes together,
            "fusional" words have one ending for everything.
        affixes: Side of the stem on which affixes are put.
        harmony: Whether affix vowels follow the stem's last vowel (front or back).
        case: What marks subject and object: nothing, an accusative, or an ergative.
        tense: How past and future are marked on or beside the verb.
        agreement: What the verb agrees with: nothing, the subject's person, or its gender.
        pronouns: Whether pronouns that the verb's agreement tells may be dropped.
        genders: Number of genders (noun classes).
        concord: Whether adjectives and articles agree with their noun.
        article: How definiteness is marked; "indefinite" marks only what is new.
        plural: How plural is marked.
        counted: Number of a noun after a number word.
        classifiers: Whether a number word needs a classifier.
        possession: Whether the owner or the owned carries the mark of possession.
        copula: Whether "is" is spoken in the present tense.
        negation: How a clause is negated.
        question: Where a question is marked.
    """

    order: Literal["SVO", "SOV", "VSO", "VOS", "OVS", "OSV"] = "SVO"
    recipient: Side = "after"
    adjective: Side = "before"
    numeral: Side = "before"
    genitive: Side = "before"
    relative: Side = "after"
    adposition: Literal["before", "after", "affix"] = "before"
    subordinator: Side = "before"
    time: Literal["first", "last"] = "last"
    place: Literal["preverbal", "last"] = "last"
    morphology: Literal["isolating", "agglutinating", "fusional"] = "isolating"
    affixes: Literal["suffix", "prefix"] = "suffix"
    harmony: bool = False
    case: Literal["none", "accusative", "ergative"] = "none"
    tense: Literal["before", "after", "affix"] = "before"
    agreement: Literal["none", "person", "gender"] = "none"
    pronouns: Literal["kept", "dropped"] = "kept"
    genders: Literal[1, 2, 3, 4] = 1
    concord: bool = False
    article: Literal["none", "before", "after", "suffix", "indefinite"] = "before"
    plural: Literal["affix", "word", "reduplication"] = "word"
    counted: Literal["singular", "plural"] = "singular"
    classifiers: bool = False
    possession: Literal["owner", "owned"] = "owner"
    copula: Literal["spoken", "silent"] = "spoken"
    negation: Literal["before", "after", "affix"] = "before"
    question: Literal["first", "last", "affix"] = "first"

    def contradiction(self) -> str | None:
        """What in this grammar contradicts itself, with the fix; None if nothing does."""
        if self.morphology == "isolating":
            wants = {
                "case": "none",
                "tense": ("before", "after"),
                "agreement": "none",
                "concord": False,
                "article": ("none", "before", "after", "indefinite"),
                "plural": ("word", "reduplication"),
                "adposition": ("before", "after"),
                "negation": ("before", "after"),
                "question": ("first", "last"),
            }
            for name, wanted in wants.items():
                value = getattr(self, name)
                if value != wanted and not (isinstance(wanted, tuple) and value in wanted):
                    return (
                        f"{name} = {_shown(value)} needs affixes, but morphology = 'isolating' has "
                        f"none; set {name} to {_shown(wanted)} or choose another morphology"
                    )
        elif self.tense != "affix" or self.plural == "word":
            name = "plural" if self.tense == "affix" else "tense"
            return (
                f"{name} = {_shown(getattr(self, name))} is for morphology = 'isolating', not "
                f"{_shown(self.morphology)}; set {name} = 'affix'"
            )
        if self.pronouns == "dropped" and self.agreement != "person":
            return (
                "pronouns = 'dropped' would leave nothing that tells the person; "
                "set agreement = 'person'"
            )
        if self.agreement == "gender" and self.genders == 1:
            return "agreement = 'gender' needs genders = 2, 3 or 4"
        return None


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " or ".join(repr(item) for item in value)
    return repr(value)


def _choices() -> dict[str, tuple[object, ...]]:
    hints = get_type_hints(Grammar)
    return {
        field.name: (False, True) if hints[field.name] is bool else get_args(hints[field.name])
        for field in fields(Grammar)
    }


# Every parameter with the values it can take.
PARAMETERS: dict[str, tuple[object, ...]] = _choices()


def typological_distance(one: Grammar, other: Grammar) -> float:
    """The share of parameters on which two grammars differ."""
    differing = sum(bool(getattr(one, name) != getattr(other, name)) for name in PARAMETERS)
    return differing / len(PARAMETERS)
