"""The family tree of the real languages, and distances read off it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gradvac.lab.languages._nearest import nearest

# Levels on which handbooks agree. A level that is disputed, or that splits nothing off, is left
# out, so that depth is roughly alike from stock to stock.
_TREE = """
Indo-European
  Germanic
    West Germanic: en de nl af lb
    North Germanic: da sv no nb nn is fo
  Romance
    Western Romance
      Gallo-Romance: fr
      Ibero-Romance: es pt gl
      Occitano-Romance: ca
    Italo-Dalmatian: it
    Eastern Romance: ro
  Celtic
    Brythonic: cy
    Goidelic: ga
  Greek: el
  Albanian: sq
  Armenian: hy
  Balto-Slavic
    Baltic: lv lt
    Slavic
      West Slavic: pl cs sk
      South Slavic: hr bs sr sl
        Eastern South Slavic: mk bg
      East Slavic: uk be ru
  Indo-Iranian
    Indo-Aryan
      Western Hindi: hi bgc ur
      Marathi-Konkani: mr
      Gujarati: gu
      Eastern Pahari: ne
      Western Pahari: bfz
      Bengali-Assamese: bn
      Greater Punjabi: pa
      Sindhi: sd
      Insular Indo-Aryan: si dv
    Iranian
      Western Iranian: fa prs tg ku kmr ckb
      Eastern Iranian: ps
Uralic
  Finnic: et fi
  Ugric: hu
Turkic
  Common Turkic
    Kipchak: kk ky tt ba
    Oghuz: tr az tk
    Karluk: ug uz
Mongolic: mn
Niger-Congo
  Benue-Congo
    Yoruboid: yo
    Igboid: ig
    Bantu
      Sabaki: sw
      Shona: sn
      Nguni: zu xh nd ss
      Sotho-Tswana: nso tn
      Great Lakes: rw
      Nyasa: ny
      Sabi: bem
      Venda: ve
  Gbe: ee
  Atlantic
    Wolof: wo
    Fula: fuc
Austronesian
  Malayo-Polynesian
    Malayic
      Malay: id ms
    Barito
      Malagasy: tdx mg
    Javanese: jv
    Philippine: tl
    Oceanic
      Fijian: fj
      Polynesian: mi sm ty to
Afro-Asiatic
  Semitic
    Central Semitic
      Canaanite: he
      Arabic: ar mt mey
    Ethiopian Semitic: am ti
  Cushitic
    Lowland East Cushitic: om so
  Berber: shi
  Chadic
    West Chadic: ha
Dravidian
  South Dravidian: ta kn ml
  South-Central Dravidian: te
Austroasiatic
  Vietic: vi
  Khmeric: km
Sino-Tibetan
  Lolo-Burmese
    Burmish: my
  Sinitic: zh yue
  Tibetic: bo dz
Kra-Dai
  Tai: th lo
Hmong-Mien
  Hmongic: hmn
Japonic: ja
Koreanic: ko
Kartvelian: ka
Basque: eu
"""


def _read(tree: str) -> dict[str, tuple[str, ...]]:
    lineages = {}
    path: list[str] = []
    for line in tree.strip().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, codes = line.strip().partition(":")
        path[depth:] = [name]
        lineages.update({code: tuple(path) for code in codes.split()})
    return lineages


LINEAGES: dict[str, tuple[str, ...]] = _read(_TREE)


def genealogical_distances(codes: Sequence[str]) -> NDArray[np.float64]:
    """How distantly real languages are related, from 0 (the same) to 1 (unrelated), `[L, L]`.

    A language stands at the end of its lineage: Indo-European, Germanic, West Germanic, German.
    Two that share the first `shared` of such steps are at 1 - 2 shared / (depth_i + depth_j).

    Args:
        codes: Codes of languages of the table, in the order of rows and columns.

    Raises:
        ValueError: A code is not in the table.

    Example:
        >>> from gradvac.lab.languages import genealogical_distances
        >>> genealogical_distances(["de", "en", "da", "fi"])[0].tolist()
        [0.0, 0.25, 0.5, 1.0]
    """
    for code in codes:
        if code not in LINEAGES:
            raise ValueError(f"no language {code!r} in the table; {nearest(code, LINEAGES)}")
    paths = [(*LINEAGES[code], code) for code in codes]
    return np.array([[_distance(one, other) for other in paths] for one in paths])


def _distance(one: tuple[str, ...], other: tuple[str, ...]) -> float:
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    return 1 - 2 * shared / (len(one) + len(other))
