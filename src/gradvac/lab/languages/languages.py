"""The real languages: the paper's tables 4 and 5, and those of NTREX, XTREME and our real data.

Table 4 lists 25 languages with a family and a level of data size; table 5 lists the 8 of WMT with
their numbers of sentence pairs. The paper merges Germanic and Romance into "Western European"; we
put Germanic and Romance languages that it does not have into the same family, so that the family
contrast means the same everywhere, and keep the finer grouping as `branch`. How the languages are
related is `lineage`, which knows nothing of the paper's grouping.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from gradvac.lab.languages._genealogy import LINEAGES
from gradvac.lab.languages._nearest import nearest
from gradvac.lab.languages._tree import RESOURCE_LEVELS, ResourceLevel
from gradvac.lab.languages._uriel import LONG_CODES


class RealLanguage(NamedTuple):
    """A real language.

    Attributes:
        code: Code used in data files: ISO 639-1, or 639-3 where that has none.
        name: English name.
        family: The paper's grouping, extended to languages it does not have.
        branch: A finer grouping.
        resource_level: The paper's level of data size (table 4); None for other languages.
    """

    code: str
    name: str
    family: str
    branch: str
    resource_level: ResourceLevel | None

    @property
    def lineage(self) -> tuple[str, ...]:
        """The groups it belongs to by descent, from its stock down to its nearest relatives."""
        return LINEAGES[self.code]


class WmtLanguage(NamedTuple):
    """A language of the paper's WMT analysis (table 5).

    Attributes:
        code: ISO 639-1 code.
        name: English name.
        family: The paper's grouping for WMT.
        num_pairs: Training sentence pairs, rounded to millions as in the paper.
        validation: Validation set on which gradients are compared.
    """

    code: str
    name: str
    family: str
    num_pairs: int
    validation: str


_LANGUAGES = (
    # Table 4.
    RealLanguage("fr", "French", "Western European", "Romance", "high"),
    RealLanguage("es", "Spanish", "Western European", "Romance", "high"),
    RealLanguage("de", "German", "Western European", "Germanic", "high"),
    RealLanguage("pl", "Polish", "West Slavic", "West Slavic", "high"),
    RealLanguage("cs", "Czech", "West Slavic", "West Slavic", "high"),
    RealLanguage("mk", "Macedonian", "South Slavic", "South Slavic", "low"),
    RealLanguage("bg", "Bulgarian", "South Slavic", "South Slavic", "medium"),
    RealLanguage("uk", "Ukrainian", "East Slavic", "East Slavic", "medium"),
    RealLanguage("be", "Belarusian", "East Slavic", "East Slavic", "low"),
    RealLanguage("ru", "Russian", "East Slavic", "East Slavic", "high"),
    RealLanguage("lv", "Latvian", "Baltic", "Baltic", "medium"),
    RealLanguage("lt", "Lithuanian", "Baltic", "Baltic", "medium"),
    RealLanguage("et", "Estonian", "Uralic", "Finnic", "medium"),
    RealLanguage("fi", "Finnish", "Uralic", "Finnic", "high"),
    RealLanguage("hi", "Hindi", "Indo-Iranian", "Indo-Aryan", "medium"),
    RealLanguage("mr", "Marathi", "Indo-Iranian", "Indo-Aryan", "extremely_low"),
    RealLanguage("gu", "Gujarati", "Indo-Iranian", "Indo-Aryan", "low"),
    RealLanguage("ne", "Nepali", "Indo-Iranian", "Indo-Aryan", "extremely_low"),
    RealLanguage("kk", "Kazakh", "Turkic", "Kipchak", "low"),
    RealLanguage("ky", "Kyrgyz", "Turkic", "Kipchak", "extremely_low"),
    RealLanguage("sw", "Swahili", "Benue-Congo", "Bantu", "low"),
    RealLanguage("zu", "Zulu", "Benue-Congo", "Nguni", "extremely_low"),
    RealLanguage("xh", "Xhosa", "Benue-Congo", "Nguni", "extremely_low"),
    RealLanguage("id", "Indonesian", "Malayo-Polynesian", "Malayic", "high"),
    RealLanguage("ms", "Malay", "Malayo-Polynesian", "Malayic", "medium"),
    # Other languages of our translation and tagging data, and of the paper's XTREME tasks.
    RealLanguage("en", "English", "Western European", "Germanic", None),
    RealLanguage("da", "Danish", "Western European", "Germanic", None),
    RealLanguage("it", "Italian", "Western European", "Romance", None),
    RealLanguage("pt", "Portuguese", "Western European", "Romance", None),
    RealLanguage("ro", "Romanian", "Western European", "Romance", None),
    RealLanguage("hr", "Croatian", "South Slavic", "South Slavic", None),
    RealLanguage("hu", "Hungarian", "Uralic", "Ugric", None),
    RealLanguage("tr", "Turkish", "Turkic", "Oghuz", None),
    RealLanguage("bgc", "Haryanvi", "Indo-Iranian", "Indo-Aryan", None),
    RealLanguage("bfz", "Mahasu Pahari", "Indo-Iranian", "Indo-Aryan", None),
    RealLanguage("sn", "Shona", "Benue-Congo", "Bantu", None),
    RealLanguage("nd", "Northern Ndebele", "Benue-Congo", "Nguni", None),
    RealLanguage("yo", "Yoruba", "Benue-Congo", "Yoruboid", None),
    RealLanguage("tdx", "Tandroy Malagasy", "Malayo-Polynesian", "Malagasy", None),
    RealLanguage("jv", "Javanese", "Malayo-Polynesian", "Javanese", None),
    RealLanguage("tl", "Tagalog", "Malayo-Polynesian", "Philippine", None),
    RealLanguage("he", "Hebrew", "Semitic", "Semitic", None),
    RealLanguage("ar", "Arabic", "Semitic", "Semitic", None),
    RealLanguage("ha", "Hausa", "Chadic", "Chadic", None),
    RealLanguage("ta", "Tamil", "Dravidian", "Dravidian", None),
    RealLanguage("te", "Telugu", "Dravidian", "Dravidian", None),
    RealLanguage("vi", "Vietnamese", "Austroasiatic", "Vietic", None),
    RealLanguage("my", "Burmese", "Sino-Tibetan", "Burmish", None),
    # The other languages of NTREX and of XTREME.
    RealLanguage("af", "Afrikaans", "Western European", "Germanic", None),
    RealLanguage("nl", "Dutch", "Western European", "Germanic", None),
    RealLanguage("lb", "Luxembourgish", "Western European", "Germanic", None),
    RealLanguage("sv", "Swedish", "Western European", "Germanic", None),
    RealLanguage("no", "Norwegian", "Western European", "Germanic", None),
    RealLanguage("nb", "Norwegian Bokmål", "Western European", "Germanic", None),
    RealLanguage("nn", "Norwegian Nynorsk", "Western European", "Germanic", None),
    RealLanguage("is", "Icelandic", "Western European", "Germanic", None),
    RealLanguage("fo", "Faroese", "Western European", "Germanic", None),
    RealLanguage("ca", "Catalan", "Western European", "Romance", None),
    RealLanguage("gl", "Galician", "Western European", "Romance", None),
    RealLanguage("cy", "Welsh", "Celtic", "Celtic", None),
    RealLanguage("ga", "Irish", "Celtic", "Celtic", None),
    RealLanguage("el", "Greek", "Greek", "Greek", None),
    RealLanguage("sq", "Albanian", "Albanian", "Albanian", None),
    RealLanguage("hy", "Armenian", "Armenian", "Armenian", None),
    RealLanguage("sk", "Slovak", "West Slavic", "West Slavic", None),
    RealLanguage("sl", "Slovenian", "South Slavic", "South Slavic", None),
    RealLanguage("bs", "Bosnian", "South Slavic", "South Slavic", None),
    RealLanguage("sr", "Serbian", "South Slavic", "South Slavic", None),
    RealLanguage("bn", "Bengali", "Indo-Iranian", "Indo-Aryan", None),
    RealLanguage("pa", "Punjabi", "Indo-Iranian", "Indo-Aryan", None),
    RealLanguage("sd", "Sindhi", "Indo-Iranian", "Indo-Aryan", None),
    RealLanguage("ur", "Urdu", "Indo-Iranian", "Indo-Aryan", None),
    RealLanguage("si", "Sinhala", "Indo-Iranian", "Indo-Aryan", None),
    RealLanguage("dv", "Dhivehi", "Indo-Iranian", "Indo-Aryan", None),
    RealLanguage("fa", "Persian", "Indo-Iranian", "Iranian", None),
    RealLanguage("prs", "Dari", "Indo-Iranian", "Iranian", None),
    RealLanguage("tg", "Tajik", "Indo-Iranian", "Iranian", None),
    RealLanguage("ps", "Pashto", "Indo-Iranian", "Iranian", None),
    RealLanguage("ku", "Kurdish", "Indo-Iranian", "Iranian", None),
    RealLanguage("kmr", "Northern Kurdish", "Indo-Iranian", "Iranian", None),
    RealLanguage("ckb", "Central Kurdish", "Indo-Iranian", "Iranian", None),
    RealLanguage("az", "Azerbaijani", "Turkic", "Oghuz", None),
    RealLanguage("tk", "Turkmen", "Turkic", "Oghuz", None),
    RealLanguage("tt", "Tatar", "Turkic", "Kipchak", None),
    RealLanguage("ba", "Bashkir", "Turkic", "Kipchak", None),
    RealLanguage("ug", "Uyghur", "Turkic", "Karluk", None),
    RealLanguage("uz", "Uzbek", "Turkic", "Karluk", None),
    RealLanguage("mn", "Mongolian", "Mongolic", "Mongolic", None),
    RealLanguage("ig", "Igbo", "Benue-Congo", "Igboid", None),
    RealLanguage("rw", "Kinyarwanda", "Benue-Congo", "Bantu", None),
    RealLanguage("ny", "Chichewa", "Benue-Congo", "Bantu", None),
    RealLanguage("bem", "Bemba", "Benue-Congo", "Bantu", None),
    RealLanguage("nso", "Northern Sotho", "Benue-Congo", "Bantu", None),
    RealLanguage("tn", "Tswana", "Benue-Congo", "Bantu", None),
    RealLanguage("ve", "Venda", "Benue-Congo", "Bantu", None),
    RealLanguage("ss", "Swati", "Benue-Congo", "Nguni", None),
    RealLanguage("ee", "Ewe", "Gbe", "Gbe", None),
    RealLanguage("wo", "Wolof", "Atlantic", "Atlantic", None),
    RealLanguage("fuc", "Pulaar", "Atlantic", "Atlantic", None),
    RealLanguage("mg", "Malagasy", "Malayo-Polynesian", "Malagasy", None),
    RealLanguage("fj", "Fijian", "Malayo-Polynesian", "Oceanic", None),
    RealLanguage("mi", "Maori", "Malayo-Polynesian", "Oceanic", None),
    RealLanguage("sm", "Samoan", "Malayo-Polynesian", "Oceanic", None),
    RealLanguage("ty", "Tahitian", "Malayo-Polynesian", "Oceanic", None),
    RealLanguage("to", "Tongan", "Malayo-Polynesian", "Oceanic", None),
    RealLanguage("mt", "Maltese", "Semitic", "Semitic", None),
    RealLanguage("mey", "Hassaniyya Arabic", "Semitic", "Semitic", None),
    RealLanguage("am", "Amharic", "Semitic", "Semitic", None),
    RealLanguage("ti", "Tigrinya", "Semitic", "Semitic", None),
    RealLanguage("om", "Oromo", "Cushitic", "Cushitic", None),
    RealLanguage("so", "Somali", "Cushitic", "Cushitic", None),
    RealLanguage("shi", "Tashelhit", "Berber", "Berber", None),
    RealLanguage("kn", "Kannada", "Dravidian", "Dravidian", None),
    RealLanguage("ml", "Malayalam", "Dravidian", "Dravidian", None),
    RealLanguage("km", "Khmer", "Austroasiatic", "Khmeric", None),
    RealLanguage("zh", "Chinese", "Sino-Tibetan", "Sinitic", None),
    RealLanguage("yue", "Cantonese", "Sino-Tibetan", "Sinitic", None),
    RealLanguage("bo", "Tibetan", "Sino-Tibetan", "Tibetic", None),
    RealLanguage("dz", "Dzongkha", "Sino-Tibetan", "Tibetic", None),
    RealLanguage("th", "Thai", "Kra-Dai", "Tai", None),
    RealLanguage("lo", "Lao", "Kra-Dai", "Tai", None),
    RealLanguage("hmn", "Hmong", "Hmong-Mien", "Hmongic", None),
    RealLanguage("ja", "Japanese", "Japonic", "Japonic", None),
    RealLanguage("ko", "Korean", "Koreanic", "Koreanic", None),
    RealLanguage("ka", "Georgian", "Kartvelian", "Kartvelian", None),
    RealLanguage("eu", "Basque", "Basque", "Basque", None),
)

LANGUAGES: dict[str, RealLanguage] = {language.code: language for language in _LANGUAGES}
# Codes of 639-3 for one variety of a language that the table has as a whole.
_VARIETIES = {"arb": "ar", "fil": "tl", "cmn": "zh", "npi": "ne", "swh": "sw", "zsm": "ms"}
_VARIETIES |= {"lvs": "lv", "ekk": "et", "pes": "fa", "azj": "az", "uzn": "uz", "khk": "mn"}
_VARIETIES |= {"plt": "mg", "gaz": "om", "als": "sq", "pbt": "ps", "mww": "hmn"}
_SHORT_CODES = {long: short for short, long in LONG_CODES.items()} | _VARIETIES

WMT: dict[str, WmtLanguage] = {
    language.code: language
    for language in (
        WmtLanguage("fr", "French", "Romance", 41_000_000, "newstest2013"),
        WmtLanguage("es", "Spanish", "Romance", 15_000_000, "newstest2012"),
        WmtLanguage("ru", "Russian", "Slavic", 38_000_000, "newstest2018"),
        WmtLanguage("cs", "Czech", "Slavic", 37_000_000, "newstest2018"),
        WmtLanguage("lv", "Latvian", "Baltic", 6_000_000, "newstest2017"),
        WmtLanguage("lt", "Lithuanian", "Baltic", 6_000_000, "newstest2019"),
        WmtLanguage("et", "Estonian", "Uralic", 2_000_000, "newstest2018"),
        WmtLanguage("fi", "Finnish", "Uralic", 6_000_000, "newstest2018"),
    )
}


def find(code: str) -> RealLanguage | None:
    """A real language, by any code that data files use for it; None if it is not here.

    Args:
        code: ISO 639-1 or 639-3, with or without a script or a region: "fr", "fra", "srp_Cyrl".
    """
    short = re.split(r"[_-]", code.lower(), maxsplit=1)[0]
    return LANGUAGES.get(code) or LANGUAGES.get(short) or LANGUAGES.get(_SHORT_CODES.get(short, ""))


def family_of(code: str) -> str:
    """The family of a real language.

    Args:
        code: Code of the language, as `find` takes it.

    Raises:
        ValueError: The language is not in the table.
    """
    language = find(code)
    if language is None:
        raise ValueError(f"no language {code!r} in the table; {nearest(code, LANGUAGES)}")
    return language.family


def codes_by_level(level: ResourceLevel) -> tuple[str, ...]:
    """The codes of the paper's languages of a resource level.

    Args:
        level: "high", "medium", "low" or "extremely_low".

    Raises:
        ValueError: There is no such level.
    """
    if level not in RESOURCE_LEVELS:
        raise ValueError(f"resource level {level!r}: {nearest(level, RESOURCE_LEVELS)}")
    return tuple(code for code, real in LANGUAGES.items() if real.resource_level == level)
