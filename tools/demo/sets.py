"""What is drawn and from where: pinned packages, styles and the classes of the demo."""

SIZE = 48  # pixels; the encoder's input size, so that nothing is resampled at run time

# Versions are pinned because the art, and with it every number in the model card, follows them.
DOMAINS = {
    "noto": "noto@1.2.9",
    "twemoji": "twemoji@1.2.5",
    "fluent-flat": "fluent-emoji-flat@1.2.6",
    "high-contrast": "fluent-emoji-high-contrast@1.2.6",
}
EMOJI_STYLES = (
    "noto-v1@1.2.5",
    "fxemoji@1.2.2",
    "emojione@1.2.3",
    "emojione-monotone@1.2.1",
    "streamline-emojis@1.2.4",
)
# Icon sets name what they draw in plain words. Those in OPEN_SETS are kept whole because their
# names are nouns; of the others only icons that carry the name of an emoji are kept, which
# leaves out the arrows and buttons of user interfaces.
ICON_SETS = (
    "mdi@1.2.3",
    "tabler@1.2.41",
    "ph@1.2.2",
    "icon-park@1.2.4",
    "lucide@1.2.137",
    "lucide-lab@1.2.3",
    "temaki@1.2.6",
    "fa6-solid@1.2.4",
    "flat-color-icons@1.2.3",
    "streamline-kameleon-color@1.2.2",
    "streamline-stickies-color@1.2.2",
    "streamline-ultimate-color@1.2.2",
)
OPEN_SETS = ("game-icons@1.2.4",)
VALIDATION = "openmoji@1.2.29"  # settings are chosen on it: not trained on, not shipped
EMOJI_DATA, EMOJI_WORDS = "emojibase-data@17.0.0", "emojilib@4.0.3"

# Demo class -> Unicode subgroups (CLDR order) that make it up.
CLASSES: dict[str, tuple[str, ...]] = {
    "mammal": ("animal-mammal",),
    "bird": ("animal-bird",),
    "sea animal": ("animal-marine",),
    "insect": ("animal-bug",),
    "fruit": ("food-fruit",),
    "vegetable": ("food-vegetable",),
    "meal": ("food-prepared", "food-asian"),
    "drink": ("drink",),
    "plant": ("plant-flower", "plant-other"),
    "vehicle": ("transport-ground", "transport-water", "transport-air"),
    "building": ("place-building", "place-religious"),
    "clothing": ("clothing",),
    "face": (
        "face-smiling",
        "face-affection",
        "face-tongue",
        "face-hand",
        "face-neutral-skeptical",
        "face-sleepy",
        "face-unwell",
        "face-concerned",
    ),
    "hand": (
        "hand-fingers-open",
        "hand-fingers-partial",
        "hand-single-finger",
        "hand-fingers-closed",
        "hands",
    ),
    "person": ("person", "person-gesture", "person-role", "person-activity", "person-sport"),
    "tool": ("tool",),
}
CAP = 36  # concepts per class; larger subgroups are thinned evenly in Unicode order
# Members of a subgroup that are not an instance of the plain class word.
NOT_OF_CLASS_TEXT = (
    "paw prints|feather|nest with eggs|empty nest|spider web|microbe|spiral shell|"
    "fingerprint|salt|butter|cooking|fork and knife|ice|wing|"
    "pouring liquid|oil drum|bus stop|station|motorway|railway track|"
    "fuel pump|wheel|police car light|horizontal traffic light|vertical traffic light|stop sign|"
    "construction|anchor|ring buoy|seat|airplane departure|airplane arrival|parachute|"
    "manual wheelchair|motorized wheelchair|roller skate|satellite|building construction|brick|"
    "rock|wood|wedding|houses|folding hand fan|hair pick|prayer beads|lipstick|ring|gem stone|"
    "shopping bags|bomb|white cane|link|broken chain|chains|balance scale|shield|dagger|"
    "crossed swords|bow and arrow|boomerang|horse racing|leaf fluttering in wind|fallen leaf|"
    "head shaking horizontally|head shaking vertically|face in clouds"
)
NOT_OF_CLASS = set(NOT_OF_CLASS_TEXT.split("|"))
STYLE_TEXT = (
    "outline outlined filled fill bold thin light duotone solid alt line broken twotone duo off "
    "variant simple rounded sharp 1 2 3 4 5 6 7 8 9 11 one two three four five six"
)
STYLE_WORDS = set(STYLE_TEXT.split())
