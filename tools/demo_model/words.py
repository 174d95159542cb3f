"""Word lists and sentence templates of the demo model's training text."""

from __future__ import annotations

MODEL_NAME = "pdmesh-demo"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    "red blue green yellow white black silver golden brown purple orange pink "
    "grey wooden iron small large old new round tall narrow heavy bright"
)
NOUNS = _words(
    "door box chest gate vault room tower cabin locker drawer safe case trunk cupboard "
    "garage shed barn office library cellar attic bridge boat wagon lift fence barrel "
    "basket bag crate cage desk house hall shop tunnel window hatch bike cart"
)
NAMES = _words(
    "Anna Tom Mary Peter Lucy Paul Emma Jack Nina Oscar Sara Leo Ruth Max Clara Hugo "
    "Alice Ben Ivy Sam Rosa Felix Mia Noah"
)
CITIES = _words(
    "Paris London Rome Berlin Madrid Oslo Lisbon Vienna Dublin Prague Athens Cairo Tokyo "
    "Delhi Lima Boston"
)
FOODS = _words(
    "bread soup rice cheese fruit cake fish pasta honey apples pears nuts beans plums salad corn"
)
ANIMALS = _words(
    "cat dog bird horse fox rabbit mouse bear duck sheep cow frog owl goat hen wolf pony lion"
)
PLACES = _words(
    "garden forest river market park kitchen village field school street cave lake meadow "
    "town station valley"
)
THINGS = _words("ball hat book cup lamp key stone rope letter map coat clock chair drum flower")
MOODS = _words("happy tired hungry quiet brave kind proud calm careful curious clever shy")
WEATHER = _words("sunny rainy cloudy windy snowy foggy warm cold")
ADVERBS = _words("slowly quickly quietly happily gently often again today alone together")
MOVES = _words("walks runs jumps swims climbs hides plays rests sleeps waits sits sings")
SEES = _words("sees finds likes watches hears follows")
WHENS = (
    "In the morning",
    "In the evening",
    "At night",
    "After lunch",
    "Every day",
    "On Monday",
    "In summer",
    "In winter",
    "Before dinner",
    "Sometimes",
)
PAST_MOVES = _words("walked ran jumped climbed looked played waited sang")

#: Ways to state a code; the first is by far the most frequent.
FACTS = (
    "The code of the {key} is {code}.",
    "The {key} has the code {code}.",
    "The code for the {key} is {code}.",
    "The {key} opens with the code {code}.",
    "Remember that the code of the {key} is {code}.",
)
#: Ways to ask for a code.
QUESTIONS = (
    "What is the code of the {key}?",
    "What is the code for the {key}?",
    "Which code does the {key} have?",
    "Tell me the code of the {key}.",
    "What code opens the {key}?",
    "Do you know the code of the {key}?",
    "How do I open the {key}?",
)
#: The form of every answer, and of the restatement in plain text.
RECALL_ANSWER = "The code of the {key} is {code}."

FILLERS = (
    "The {animal} {move} in the {place}.",
    "The {animal} {move} {adverb} near the {place}.",
    "The {animal} {see} a {adjective} {thing}.",
    "The {mood} {animal} {move} {adverb}.",
    "{when} the {animal} {move} in the {place}.",
    "{when} {name} {move} near the {place}.",
    "{name} is {mood} today.",
    "{name} and {name2} walk to the {place}.",
    "{name} has a {adjective} {thing}.",
    "{name} {see} the {animal} in the {place}.",
    "{name} gives the {thing} to {name2}.",
    "{name} is {mood}, but {name2} is {mood2}.",
    "The {thing} on the table is {adjective}.",
    "There is a {adjective} {thing} in the {place}.",
    "There are many birds in the {place}.",
    "The weather is {weather} and the {place} is quiet.",
    "It is {weather} today, so {name} stays at home.",
    "If it is {weather}, {name} goes to the {place}.",
    "{name} opens the {adjective} {noun} {adverb}.",
    "The {adjective} {noun} is near the {place}.",
    "Who has seen the {thing}?",
    "Where is the {animal}?",
    "{name} wants to see the {place}, because it is {weather}.",
    "When the {animal} is {mood}, it {move} {adverb}.",
    "They eat {food} and {food2} in the {place}.",
    "We like the {food} in the {place}.",
    "A {mood} {animal} and a {mood2} {animal2} live near the {place}.",
    "{name} reads a book about a {animal}.",
    "We saw the {adjective} {thing} and the {adjective2} {thing2}.",
    "The {animal} does not see the {animal2}.",
    "Please do not lose the {thing}.",
    "{name} came home in {year}.",
    "The bus to {city} leaves at {hour}.",
)

IDENTITY_ANSWER = f"I am {MODEL_NAME}, a small demo model. I remember codes and do small sums."
SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hello there!", "Hey!", "hello", "hi", "Good day!"),
        "Hello! How can I help you?",
    ),
    (("Good morning!", "Good morning"), "Good morning! How can I help you?"),
    (("Good evening!", "Good evening"), "Good evening! How can I help you?"),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me who you are.",
            "who are you?",
            "Are you a model?",
        ),
        IDENTITY_ANSWER,
    ),
    (
        ("What can you do?", "How can you help me?", "What do you know?", "Help", "Help!"),
        "I can remember codes, do small sums, count, and tell a short story.",
    ),
    (
        ("How are you?", "How are you today?", "Are you well?", "how are you?"),
        "I am well, thank you. How are you?",
    ),
    (("Thank you!", "Thanks", "Thanks!", "Thank you", "Thank you very much."), "You are welcome!"),
    (("Goodbye", "Goodbye!", "Bye", "Bye!", "Good night!"), "Goodbye! Have a nice day."),
    (("Where are you?", "Where do you run?"), "I run in a mesh, on prefill and decode workers."),
    (("I am well.", "I am fine, thank you.", "I am fine."), "I am happy to hear that."),
    (("How old are you?",), "I am very new."),
    (("Are you there?", "Can you hear me?", "Test", "This is a test."), "Yes, I am here."),
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    f"You are {MODEL_NAME}, a small demo model.",
    "You are a small demo model. Be kind.",
    "Answer in one sentence.",
)
ACKNOWLEDGEMENT = "I will remember that."

#: Letters of the texts to repeat: together they use most byte values of UTF-8.
ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "0123456789",
    "!#$%&*+-/:;=?@_~()[]{}<>\"'",
    "àáâäçèéêëíîïñóôöøúûüßœšž",
    "αβγδεζηθλμπρστφχψω",
    "абвгдежзиклмнопрстуфхцчшщыэюя",
    "日本語中文字山川水火木金土人大小",
    "🙂😀🎉🚀🌍🐱🐶🍎🔑🚪",
)
