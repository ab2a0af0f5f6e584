"""The twenty superclasses of CIFAR-100, five classes each."""

from collections.abc import Sequence

from fedvlm.errors import SettingsError

SUPERCLASSES = {
    "aquatic mammals": "beaver, dolphin, otter, seal, whale",
    "fish": "aquarium fish, flatfish, ray, shark, trout",
    "flowers": "orchid, poppy, rose, sunflower, tulip",
    "food containers": "bottle, bowl, can, cup, plate",
    "fruit and vegetables": "apple, mushroom, orange, pear, sweet pepper",
    "household electrical devices": "clock, keyboard, lamp, telephone, television",
    "household furniture": "bed, chair, couch, table, wardrobe",
    "insects": "bee, beetle, butterfly, caterpillar, cockroach",
    "large carnivores": "bear, leopard, lion, tiger, wolf",
    "large man-made outdoor things": "bridge, castle, house, road, skyscraper",
    "large natural outdoor scenes": "cloud, forest, mountain, plain, sea",
    "large omnivores and herbivores": "camel, cattle, chimpanzee, elephant, kangaroo",
    "medium-sized mammals": "fox, porcupine, possum, raccoon, skunk",
    "non-insect invertebrates": "crab, lobster, snail, spider, worm",
    "people": "baby, boy, girl, man, woman",
    "reptiles": "crocodile, dinosaur, lizard, snake, turtle",
    "small mammals": "hamster, mouse, rabbit, shrew, squirrel",
    "trees": "maple tree, oak tree, palm tree, pine tree, willow tree",
    "vehicles 1": "bicycle, bus, motorcycle, pickup truck, train",
    "vehicles 2": "lawn mower, rocket, streetcar, tank, tractor",
}
SUPERCLASS_OF = {class_name: name for name, members in SUPERCLASSES.items() for class_name in members.split(", ")}


def superclasses(classes: Sequence[str]) -> list[str]:
    """The superclass of each class; classes of other data have none."""
    for name in classes:
        if name not in SUPERCLASS_OF:
            raise SettingsError(
                f"class {name!r} has no superclass: clients by superclass are for CIFAR-100; "
                'make them by "dirichlet" or "pathological"'
            )
    return [SUPERCLASS_OF[name] for name in classes]
