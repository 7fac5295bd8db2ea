"""The words that the training text is made of. Lists only: the grammar is in the files that use them."""

WOMEN = """
Mary Anna Emma Sarah Laura Alice Julia Susan Helen Nancy Karen Diana Linda Rachel Sophie Emily Olivia Grace Chloe
Lucy Nora Ella Mia Zoe Amy Kate Jane Ruth Rose Clara Irene Maria Lisa Sandra Monica Teresa Vera Wendy Hannah Naomi
Esther Megan Molly Fiona Amber Nicole Rebecca Vanessa Claire Tina Bella Holly Ivy Joyce Paula Daisy
""".split()

MEN = """
John Tom James Paul Peter David Mark Kevin Brian Frank Simon Henry Oscar Victor Martin George Robert Daniel Adam
Jack Max Leo Sam Ben Luke Ryan Eric Carl Ian Neil Hugo Felix Oliver Thomas Edward Philip Arthur Walter Louis Samuel
Joseph Stephen Andrew Charles Patrick Michael William Anthony Joshua Nathan Isaac Gavin Jason Colin Derek Elliot
""".split()
NAMES = WOMEN + MEN

PROFESSIONS = """
doctor baker painter lawyer pilot singer farmer nurse writer cook tailor sailor
""".split()

SURNAMES = """
Baker Carter Dawson Ellis Fisher Graham Harper Jensen Keller Lawson Mercer Norton Palmer Quinn Reeves Sutton Turner
Vaughn Walker Yates Barlow Connor Dalton Emerson
""".split()

PLACES = """
store park school office market garden library beach station museum restaurant hospital theatre bakery bank bridge
church farm forest harbour hotel kitchen lake mall mountain pool river shop stadium street village zoo cinema cafe
airport castle playground workshop gym house
""".split()

OBJECTS = """
drink book ball kite letter cake phone key ring basket bottle camera pencil hat coat ticket flower sandwich map
lamp guitar present necklace umbrella newspaper bag box bracelet bone computer cup toy clock chair blanket mirror
puzzle scarf spoon plate watch
""".split()

COLOURS = """
red blue green yellow black white brown pink purple orange grey silver golden
""".split()

CONTAINERS = """
drawer cupboard suitcase backpack bucket jar chest wardrobe shed garage cellar attic
""".split()

# What may follow in place of a name: with it the right name stays below certainty.
SOMEONE = [
    "the teacher", "a friend", "everyone", "someone else", "the children", "the neighbours", "the others",
    "the waiter", "a stranger", "the girl", "the boy", "the driver", "the old man", "the whole family",
]  # fmt: skip

# Nouns with their plurals, for agreement.
NOUNS = {
    word.split("/")[0]: word.split("/")[1]
    for word in """
    key/keys cabinet/cabinets dog/dogs child/children picture/pictures door/doors student/students manager/managers
    author/authors teacher/teachers car/cars window/windows table/tables farmer/farmers pilot/pilots tree/trees
    painting/paintings senator/senators guard/guards bird/birds house/houses lamp/lamps book/books singer/singers
    doctor/doctors horse/horses flower/flowers boat/boats letter/letters chair/chairs nurse/nurses truck/trucks
    box/boxes cat/cats customer/customers soldier/soldiers neighbour/neighbours bottle/bottles shirt/shirts
    bicycle/bicycles
    """.split()
}

EVENTS = """
war siege trial journey famine strike voyage festival drought dispute expedition marriage reign rebellion treaty
project investigation exhibition partnership experiment tour crisis epidemic construction friendship campaign
""".split()

FRUITS = """
apple pear plum cherry lemon peach grape melon fig olive carrot onion potato tomato pepper bean pea corn rice bread
butter cheese milk honey sugar salt
""".split()
