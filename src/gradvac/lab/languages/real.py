"""The real languages: the paper's table 4, and those of NTREX, XTREME and our real data.

Table 4 lists 25 languages with a family and a level of data size. The paper merges Germanic and
Romance into "Western European"; we put Germanic and Romance languages that it does not have into
the same family, so that the family contrast means the same everywhere, and keep the finer grouping
as `branch`. How the languages are related is `lineage`, which knows nothing of the paper's
grouping: distances in the family tree are read off it, and those of URIEL from the files of the
optional package `urielplus`.

`real.tsv` has a line for each language. A lineage has the levels on which handbooks agree: one that
is disputed, or that splits nothing off, is left out, so that depth is roughly alike from stock to
stock.

The class of `urielplus` copies files into its folder, sets up logging for the whole program and
takes long for families of many languages, so we read its four data files and apply its formula.
Where little is recorded we say "unknown" instead: the package puts Danish and Croatian, of which it
can compare 12 features, at distance 0, and likewise Basque and Bokmål, of no known family.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradvac.lab.languages.families import RESOURCE_LEVELS, ResourceLevel
from gradvac.utils.hints import install_line, nearest


class RealLanguage(NamedTuple):
    """A real language.

    Attributes:
        code: Code used in data files: ISO 639-1, or 639-3 where that has none.
        name: English name.
        family: The paper's grouping, extended to languages it does not have.
        branch: A finer grouping.
        resource_level: The paper's level of data size (table 4); None for other languages.
        lineage: The groups it belongs to by descent, from its stock down to its nearest relatives.
    """

    code: str
    name: str
    family: str
    branch: str
    resource_level: ResourceLevel | None
    lineage: tuple[str, ...]


def _read(line: str) -> RealLanguage:
    code, name, family, branch, level, lineage = line.split("\t")
    known = next((one for one in RESOURCE_LEVELS if one == level), None)
    return RealLanguage(code, name, family, branch, known, tuple(lineage.split(" > ")))


_TABLE = Path(__file__).with_name("real.tsv").read_text(encoding="utf-8").splitlines()
LANGUAGES: dict[str, RealLanguage] = {
    language.code: language for language in (_read(line) for line in _TABLE if line[0] != "#")
}


def genealogical_distances(codes: Sequence[str]) -> NDArray[np.float64]:
    """How distantly real languages are related, from 0 (the same) to 1 (unrelated), `[L, L]`.

    A language stands at the end of its lineage: Indo-European, Germanic, West Germanic, German.
    Two that share the first `shared` of such steps are at 1 - 2 shared / (depth_i + depth_j).

    Args:
        codes: Codes of languages of the table, in the order of rows and columns.

    Raises:
        ValueError: A code is not in the table.

    Examples:
        >>> from gradvac.lab.languages import genealogical_distances
        >>> genealogical_distances(["de", "en", "da", "fi"])[0].tolist()
        [0.0, 0.25, 0.5, 1.0]
    """
    for code in codes:
        if code not in LANGUAGES:
            raise ValueError(f"no language {code!r} in the table; {nearest(code, LANGUAGES)}")
    paths = [(*LANGUAGES[code].lineage, code) for code in codes]
    return np.array([[_distance(one, other) for other in paths] for one in paths])


def _distance(one: tuple[str, ...], other: tuple[str, ...]) -> float:
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    return 1 - 2 * shared / (len(one) + len(other))


# Kind of distance -> file, and how the names of its features begin.
_SOURCES = {
    "featural": ("features", ""),
    "syntactic": ("features", "S_"),
    "phonological": ("features", "P_"),
    "inventory": ("features", "INV_"),
    "genetic": ("family_features", ""),
    "geographic": ("geocoord_features", ""),
    "script": ("script_features", ""),
}
URIEL_KINDS = tuple(_SOURCES)
_FEWEST_SHARED = 20  # features known of both languages

# ISO 639-1 -> 639-3, which URIEL goes by.
_ISO_639 = """
aa:aar ab:abk ae:ave af:afr ak:aka am:amh an:arg ar:ara as:asm av:ava ay:aym az:aze ba:bak be:bel
bg:bul bi:bis bm:bam bn:ben bo:bod br:bre bs:bos ca:cat ce:che ch:cha co:cos cr:cre cs:ces cu:chu
cv:chv cy:cym da:dan de:deu dv:div dz:dzo ee:ewe el:ell en:eng eo:epo es:spa et:est eu:eus fa:fas
ff:ful fi:fin fj:fij fo:fao fr:fra fy:fry ga:gle gd:gla gl:glg gn:grn gu:guj gv:glv ha:hau he:heb
hi:hin ho:hmo hr:hrv ht:hat hu:hun hy:hye hz:her ia:ina id:ind ie:ile ig:ibo ii:iii ik:ipk io:ido
is:isl it:ita iu:iku ja:jpn jv:jav ka:kat kg:kon ki:kik kj:kua kk:kaz kl:kal km:khm kn:kan ko:kor
kr:kau ks:kas ku:kur kv:kom kw:cor ky:kir la:lat lb:ltz lg:lug li:lim ln:lin lo:lao lt:lit lu:lub
lv:lav mg:mlg mh:mah mi:mri mk:mkd ml:mal mn:mon mr:mar ms:msa mt:mlt my:mya na:nau nb:nob nd:nde
ne:nep ng:ndo nl:nld nn:nno no:nor nr:nbl nv:nav ny:nya oc:oci oj:oji om:orm or:ori os:oss pa:pan
pi:pli pl:pol ps:pus pt:por qu:que rm:roh rn:run ro:ron ru:rus rw:kin sa:san sc:srd sd:snd se:sme
sg:sag si:sin sk:slk sl:slv sm:smo sn:sna so:som sq:sqi sr:srp ss:ssw st:sot su:sun sv:swe sw:swa
ta:tam te:tel tg:tgk th:tha ti:tir tk:tuk tl:tgl tn:tsn to:ton tr:tur ts:tso tt:tat tw:twi ty:tah
ug:uig uk:ukr ur:urd uz:uzb ve:ven vi:vie vo:vol wa:wln wo:wol xh:xho yi:yid yo:yor za:zha zh:zho
zu:zul
"""
LONG_CODES = dict(pair.split(":") for pair in _ISO_639.split())


def uriel_distances(codes: Sequence[str], kind: str) -> NDArray[np.float64]:
    """The distances between real languages according to URIEL, from 0 to 1, `[L, L]`.

    The distance of two languages is the angle between their vectors of features, as a part of a
    right angle, over the features that are known of both; NaN if those are fewer than 20.

    Args:
        codes: ISO 639-1 or 639-3 codes, in the order of rows and columns.
        kind: "featural", or its parts "syntactic", "phonological" and "inventory"; "genetic",
            "geographic" or "script".

    Raises:
        ValueError: `urielplus` is not installed, or there is no such kind.
    """
    if kind not in _SOURCES:
        raise ValueError(f"kind of URIEL distance {kind!r}: {nearest(kind, _SOURCES)}")
    name, prefix = _SOURCES[kind]
    with np.load(_folder() / f"{name}.npz") as file:
        chosen = np.char.startswith(file["feats"], prefix)
        rows = {str(language): row for row, language in enumerate(file["langs"])}
        data = file["data"].max(axis=2)  # over sources; -1 is unknown
    values = np.full((len(codes), int(chosen.sum())), -1.0)  # [L, features]
    for place, code in enumerate(codes):
        row = rows.get(LONG_CODES.get(code, code))
        if row is not None:
            values[place] = data[row, chosen]
    return _angles(values)


def _angles(values: NDArray[np.float64]) -> NDArray[np.float64]:
    known = values >= 0
    values = np.where(known, values, 0.0)
    lengths = values**2 @ known.T  # of a row's vector, over what a column's language has too
    scale = np.sqrt(lengths * lengths.T)
    cosines = np.full_like(scale, np.nan)
    enough = known.astype(np.float64) @ known.T >= _FEWEST_SHARED
    np.divide(values @ values.T, scale, out=cosines, where=enough & (scale > 0))
    angles = np.arccos(cosines.clip(-1, 1)) * 2 / np.pi
    np.fill_diagonal(angles, 0.0)
    return np.asarray(angles)


def _folder() -> Path:
    spec = importlib.util.find_spec("urielplus")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"URIEL distances need the package `urielplus`; {install_line('uriel')}.")
    return Path(spec.submodule_search_locations[0]) / "database" / "original_uriel"


# Codes of 639-3 for one variety of a language that the table has as a whole.
_VARIETIES = {"arb": "ar", "fil": "tl", "cmn": "zh", "npi": "ne", "swh": "sw", "zsm": "ms"}
_VARIETIES |= {"lvs": "lv", "ekk": "et", "pes": "fa", "azj": "az", "uzn": "uz", "khk": "mn"}
_VARIETIES |= {"plt": "mg", "gaz": "om", "als": "sq", "pbt": "ps", "mww": "hmn"}
_SHORT_CODES = {long: short for short, long in LONG_CODES.items()} | _VARIETIES


def find(code: str) -> RealLanguage | None:
    """A real language, by any code that data files use for it; None if it is not here.

    Args:
        code: ISO 639-1 or 639-3, with or without a script or a region: "fr", "fra", "srp_Cyrl".
    """
    short = re.split(r"[_-]", code.lower(), maxsplit=1)[0]
    return LANGUAGES.get(code) or LANGUAGES.get(short) or LANGUAGES.get(_SHORT_CODES.get(short, ""))
