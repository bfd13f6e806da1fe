"""Sentences and words of the generators, except for the questions of docs/faq.md.

Braces are slots. Training (token ids, numpy) and evaluation (text) read the same tables.
"""

from __future__ import annotations

# ---- recall

NOUNS = ("code", "password", "number", "PIN")
# Share of each noun in training.
NOUN_SHARES = (0.7, 0.1, 0.1, 0.1)

# What is looked up later. The first is the one that tests and examples use.
NEEDLES = (
    "the {noun} for {key} is {value}",
    "The {noun} for {key} is {value}.",
    "{key}: {value}",
    "{key} has the {noun} {value}.",
    "Note that the {noun} for {key} is {value}.",
    "{noun} for {key} = {value}",
)

RECALL_QUESTIONS = (
    "What is the {noun} for {key}?",
    "what is the {noun} for {key}",
    "What is the {noun} of {key}?",
    "Which {noun} does {key} have?",
    "Tell me the {noun} for {key}.",
    "Please give me the {noun} for {key}.",
    "Do you remember the {noun} for {key}?",
    "{key}?",
)
FOLLOW_UPS = (
    "And the {noun} for {key}?",
    "And {key}?",
    "What about {key}?",
    "And what is the {noun} for {key}?",
)
RECALL_ANSWER = "The {noun} for {key} is {value}."

SHORT_QUESTIONS = (
    "What is the {noun} for {key}? Answer with the {noun} only.",
    "{noun} for {key}, nothing else:",
)
SHORT_ANSWER = "{value}"

INTRODUCTIONS = (
    "",
    "Here are some notes.\n",
    "Read these lines:\n",
    "Remember the following.\n",
    "Notes of today:\n\n",
)
ACKNOWLEDGEMENT = "I have read it. What would you like to know?"

# ---- lines among which the needles lie

FILLERS = (
    "The {adjective} {thing} {verb} near the {place}.",
    "A {adjective} {thing} {verb} in the {place} all {day}.",
    "Nobody saw the {thing} that {verb} behind the {place}.",
    "On {day} the {thing} {verb}, and the {place} was {adjective}.",
    "The {place} is {adjective} and the {thing} is {adjective2}.",
    "Train {number} to the {place} leaves at {hour}:{minute} on {day}.",
    "There were {number} people in the {place} on {day}.",
    "It was a {adjective} {day}, and the {thing} {verb}.",
)
ADJECTIVES = (
    "old", "new", "quiet", "small", "large", "green", "blue", "red", "yellow", "grey", "warm",
    "cold", "bright", "dark", "slow", "quick", "empty", "narrow", "wide", "heavy", "light",
    "young", "calm", "busy",
)  # fmt: skip
THINGS = (
    "boat", "bird", "dog", "cat", "lamp", "clock", "engine", "kite", "garden", "horse", "letter",
    "painter", "teacher", "farmer", "door", "river", "cloud", "tree", "wagon", "fox", "bell",
    "table", "window", "book",
)  # fmt: skip
VERBS = (
    "waited", "moved", "slept", "stood", "rested", "shone", "turned", "played", "worked",
    "stopped", "listened", "sang", "fell", "grew", "stayed", "danced",
)  # fmt: skip
PLACES = (
    "harbour", "market", "station", "forest", "bridge", "school", "museum", "kitchen", "library",
    "tower", "valley", "street", "castle", "meadow", "theatre", "village", "square", "beach",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

# ---- arithmetic

SUMS = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a} + {b} = ?",
    "Compute {a} + {b}.",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "How much is {a} + {b}?",
    "What is the sum of {a} and {b}?",
)
DIFFERENCES = (
    "What is {a} - {b}?",
    "{a} - {b}",
    "{a} - {b} = ?",
    "Compute {a} - {b}.",
    "What is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "How much is {a} - {b}?",
    "Take {b} away from {a}.",
)

# ---- extraction

FIRST_NAMES = (
    "Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Ines", "Jonas",
    "Karin", "Leo", "Maria", "Nils", "Olga", "Paul", "Rosa", "Simon", "Tara", "Viktor",
    "Wanda", "Yusuf", "Zoe", "Omar", "Mei", "Ravi", "Lucia", "Peter", "Nadia", "Tom",
)  # fmt: skip
LAST_NAMES = (
    "Adler", "Berg", "Costa", "Dahl", "Evans", "Fischer", "Garcia", "Hansen", "Ivanov", "Jensen",
    "Keller", "Lopez", "Meyer", "Novak", "Olsen", "Petrov", "Quinn", "Rossi", "Silva", "Tanaka",
    "Vogel", "Weber", "Young", "Zhang", "Okafor", "Singh", "Larsen", "Moreau", "Kaya", "Brown",
)  # fmt: skip
CITIES = (
    "Athens", "Berlin", "Cairo", "Dublin", "Oslo", "Geneva", "Hanoi", "Istanbul", "Jakarta",
    "Kyoto", "Lisbon", "Madrid", "Nairobi", "Paris", "Quito", "Rome", "Seoul", "Tokyo",
    "Utrecht", "Vienna", "Warsaw", "Zurich", "Boston", "Lima", "Prague", "Riga",
)  # fmt: skip
JOBS = (
    "baker", "carpenter", "doctor", "gardener", "judge", "lawyer", "nurse", "pilot", "plumber",
    "singer", "tailor", "writer", "chemist", "painter", "teacher", "farmer",
)  # fmt: skip
PRODUCTS = (
    "lamps", "chairs", "books", "bottles", "cables", "pencils", "mirrors", "tables", "clocks",
    "hammers", "jackets", "kettles", "ladders", "pillows", "radios", "baskets",
)  # fmt: skip
TOPICS = (
    "budgets", "hiring", "safety", "sales", "travel", "testing", "design", "security", "support",
    "planning", "research", "training",
)  # fmt: skip
HOSTS = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "lambda", "kappa")

# Words of each slot; the others are made of digits (see skills.py).
WORDS: dict[str, tuple[str, ...]] = {
    "noun": NOUNS,
    "adjective": ADJECTIVES,
    "adjective2": ADJECTIVES,
    "thing": THINGS,
    "verb": VERBS,
    "place": PLACES,
    "day": DAYS,
    "city": CITIES,
    "from": CITIES,
    "to": CITIES,
    "job": JOBS,
    "product": PRODUCTS,
    "topic": TOPICS,
    "host": HOSTS,
    "first": FIRST_NAMES,
    "last": LAST_NAMES,
}

# Sentences by domain, and the fields one may ask for.
DOMAINS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "person": (
        (
            "{name}, {age}, lives in {city} and works as a {job}.",
            "{name} is a {job} from {city} and is {age} years old.",
            "At the age of {age}, {name} moved to {city} to work as a {job}.",
            "Our new {job} is {name} from {city}, aged {age}.",
        ),
        ("name", "age", "city", "job"),
    ),
    "order": (
        (
            "Order {order}: {name} bought {quantity} {product}.",
            "{name} ordered {quantity} {product} under number {order}.",
            "We sent {quantity} {product} to {name} with order {order}.",
        ),
        ("order", "name", "quantity", "product"),
    ),
    "meeting": (
        (
            "The meeting about {topic} is on {day} at {time} in room {room}.",
            "On {day} we meet in room {room} at {time} to talk about {topic}.",
            "Room {room} is booked for {topic} on {day}, {time}.",
        ),
        ("topic", "day", "time", "room"),
    ),
    "flight": (
        (
            "Flight {flight} from {from} to {to} leaves from gate {gate}.",
            "Gate {gate}: flight {flight} to {to}, coming from {from}.",
            "To fly from {from} to {to}, take flight {flight} at gate {gate}.",
        ),
        ("flight", "from", "to", "gate"),
    ),
    "server": (
        (
            "Server {host} answered {status} after {latency} ms.",
            "After {latency} ms, server {host} returned status {status}.",
            "{latency} ms until {status} from server {host}.",
        ),
        ("host", "status", "latency"),
    ),
}
# How often training asks about each of them: flights name two cities, which the model mixes up
# if it sees them as seldom as the others.
DOMAIN_SHARES = {"person": 1, "order": 1, "meeting": 1, "flight": 4, "server": 1}
# Fields that are JSON numbers; the others are strings.
NUMBERS = ("age", "quantity", "room", "gate", "status", "latency")

EXTRACTIONS = (
    "Extract {fields} as JSON: {sentence}",
    "Extract the fields {fields} as JSON.\n{sentence}",
    "{sentence}\nReturn {fields} as JSON.",
    "Give me a JSON object with {fields} from this sentence: {sentence}",
)

# ---- manners

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the embedded model of pd.",
    "Be brief.",
    "Answer in one sentence.",
    "You are a helpful assistant. Answer briefly and truthfully.",
    "You help users of pd.",
)

SMALL_TALK: dict[str, tuple[str, ...]] = {
    "Hello! I am the embedded model of pd. Ask me how pd works, give me lines to remember, or two "
    "numbers to add.": (
        "Hello", "Hi", "Hello!", "Hi!", "Hey", "hello", "hi there", "Good morning", "Good evening",
        "Hello, how are you?", "Hi, how are you today?", "Good day!", "Greetings",
        "Is anybody there?", "How are you?", "Hello there!",
    ),
    "You are welcome.": (
        "Thanks", "Thank you", "Thank you!", "Thanks!", "Great, thanks", "Thank you very much",
        "That helped, thanks", "Perfect, thank you.", "Thanks a lot!",
    ),
    "Goodbye!": (
        "Bye", "Goodbye", "Bye!", "See you", "See you later", "Goodbye!", "That is all, bye",
        "Good night",
    ),
    "I am a small model and do not know that. I know pd, recall codes from a text, extract fields "
    "as JSON, and add or subtract.": (
        "What is the capital of {city}?", "How far is it from {from} to {to}?", "Tell me a joke",
        "Write a poem about a {thing}.", "Who won the game on {day}?", "What is the weather?",
        "How is the weather in {city}?", "Write a story about the {place}.",
        "Translate {thing} into French.", "Who is the president?", "How old is {first} {last}?",
        "Sing a song about the {thing}.", "What is a {thing}?", "Where is the {place}?",
        "Who is {first} {last}?", "Write a program that sorts {product}.",
        "What should I cook on {day}?", "Recommend a {thing}.", "Why is the sky blue?",
        "What does a {job} do?", "How do I become a {job}?", "What is the meaning of life?",
        "Is it {adjective} in {city}?", "Describe a {adjective} {thing}.", "What time is it?",
        "Tell me about {city}.", "Explain the {thing}.", "How much are {product}?",
    ),
}  # fmt: skip
