"""The table of real languages says what the paper's tables 4 and 5 say."""

from __future__ import annotations

import numpy as np
import pytest

from gradvac.lab.languages import RESOURCE_LEVELS, genealogical_distances, real


def test_levels_have_the_sizes_the_paper_gives() -> None:
    """Appendix A: "High (7), Medium (8), Low (5), and Extremely Low (5)" - its table differs.

    The table lists 8 high and 7 medium languages, low and extremely low as in the text; we follow
    the table.
    """
    levels = [language.resource_level for language in real.LANGUAGES.values()]
    sizes = {level: levels.count(level) for level in RESOURCE_LEVELS}
    assert sizes == {"high": 8, "medium": 7, "low": 5, "extremely_low": 5}
    lowest = [code for code, one in real.LANGUAGES.items() if one.resource_level == "extremely_low"]
    assert lowest == ["mr", "ne", "ky", "zu", "xh"]


def test_the_paper_has_25_languages_in_10_families() -> None:
    ours = [lang for lang in real.LANGUAGES.values() if lang.resource_level is not None]
    assert len(ours) == 25
    assert len({language.family for language in ours}) == 10
    families = {code: language.family for code, language in real.LANGUAGES.items()}
    assert families["de"] == families["fr"] == "Western European"
    assert families["fi"] == "Uralic"


def test_all_languages_of_the_real_data_are_there() -> None:
    data = (
        "pt uk mk fi pl ru mr de cs es fr tr bg hi id lt be et lv en da it hr he sw sn nd tdx ha "
        "hu ro bgc bfz gu ne kk zu xh ms ky ar ta te vi tl yo"
    )
    assert set(data.split()) <= set(real.LANGUAGES)


def test_lineages_and_branches_agree() -> None:
    for language in real.LANGUAGES.values():
        assert language.branch in language.lineage, language.name
    assert real.LANGUAGES["zu"].lineage == ("Niger-Congo", "Benue-Congo", "Bantu", "Nguni")
    # The paper's families are no stocks, but none spans two of them.
    stocks: dict[str, set[str]] = {}
    for language in real.LANGUAGES.values():
        stocks.setdefault(language.family, set()).add(language.lineage[0])
    assert all(len(found) == 1 for found in stocks.values())


def test_genealogical_distance_by_hand() -> None:
    # German and English share 3 of 4 steps, German and Danish 2 of 4; Spanish takes 5.
    found = genealogical_distances(["de", "en", "da", "es", "fi"])
    assert found[0] == pytest.approx([0, 1 / 4, 1 / 2, 1 - 2 / 9, 1])


def test_genealogical_distance_of_the_table() -> None:
    codes = list(real.LANGUAGES)
    found = genealogical_distances(codes)
    assert np.array_equal(found, found.T)
    assert (np.diag(found) == 0).all()
    assert found[~np.eye(len(codes), dtype=bool)].min() > 0

    def apart(one: str, other: str) -> float:
        return float(found[codes.index(one), codes.index(other)])

    nearer = [("mk", "bg", "hr"), ("hr", "bg", "cs"), ("cs", "hr", "lt"), ("lt", "cs", "de")]
    nearer += [("es", "pt", "fr"), ("fr", "es", "ro"), ("zu", "xh", "sw"), ("sw", "zu", "yo")]
    nearer += [("kk", "ky", "tr"), ("id", "ms", "tdx"), ("he", "ar", "ha"), ("ha", "he", "sw")]
    for one, near, far in nearer:
        assert apart(one, near) < apart(one, far), (one, near, far)


def test_unknown_codes_are_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'frr'.*'fr'"):
        genealogical_distances(["de", "frr"])


NTREX = (
    "afr amh arb aze-Latn bak bel bem ben bod bos bul cat ces ckb-Arab cym dan deu div dzo ell "
    "eng-GB est eus ewe fao fas fij fil fin fra fra-CA fuc gle glg guj hau heb hin hmn hrv hun hye "
    "ibo ind isl ita jpn kan kat kaz khm kin kir kmr kor lao lav lit ltz mal mar mey mkd mlg mlt "
    "mon mri msa mya nde nep nld nno nob nso nya orm pan pol por por-BR prs pus ron rus shi sin "
    "slk slv smo sna-Latn snd-Arab som spa spa-MX sqi srp-Cyrl srp-Latn ssw swa swe tah tam tat "
    "tel tgk-Cyrl tha tir ton tsn tuk tur uig ukr urd uzb ven vie wol xho yor yue zho-CN zho-TW zul"
)
XTREME = (
    "af ar bg bn de el en es et eu fa fi fr he hi hu id it ja jv ka kk ko ml mr ms my nl pt ru sw "
    "ta te th tl tr ur vi yo zh"
)


def test_the_languages_of_ntrex_and_xtreme_are_there() -> None:
    assert len(set(XTREME.split())) == 40
    assert [code for code in (NTREX + " " + XTREME).split() if real.find(code) is None] == []
    found = {real.find(code) for code in NTREX.split()}
    assert len(found) >= 110


def test_languages_by_their_codes() -> None:
    for codes, name in (("sr srp srp_Cyrl srp-Latn", "Serbian"), ("zh zho cmn zho-TW", "Chinese")):
        assert {real.find(code).name for code in codes.split()} == {name}  # type: ignore[union-attr]
    assert real.find("qqq") is None
    assert real.find("") is None
    assert real.find("deu") == real.LANGUAGES["de"]
