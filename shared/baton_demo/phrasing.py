"""Variations of questions: the many ways in which people phrase the same one."""

from collections.abc import Mapping, Sequence
from random import Random

FRAMES: dict[str, tuple[str, ...]] = {
    "what": (
        "What is {}?",
        "What's {}?",
        "What is {} in Baton?",
        "What is meant by {}?",
        "What exactly is {}?",
        "What does {} mean?",
        "What do you know about {}?",
        "Tell me about {}.",
        "Tell me what {} is.",
        "Could you tell me what {} is?",
        "Can you tell me about {}?",
        "Do you know what {} is?",
        "Explain {}.",
        "Explain {} to me.",
        "Explain what {} is.",
        "Please explain {}.",
        "Can you explain {}?",
        "Could you explain {} briefly?",
        "How would you explain {}?",
        "Describe {}.",
        "Define {}.",
        "Give me a definition of {}.",
        "I want to know about {}.",
        "I would like to know what {} is.",
        "I do not understand {}.",
        "What about {}?",
        "What does {} do?",
        "What is {} good for?",
        "What is {} about?",
        "What is the purpose of {}?",
        "What is the role of {}?",
        "What role does {} play?",
        "Why is there {}?",
        "How would you describe {}?",
        "In a few words, what is {}?",
        "In short, what is {}?",
        "Could you explain what {} does?",
        "Please describe {} to me",
        "Please tell me about {}.",
        "I keep hearing about {}.",
        "I have heard of {}, what is it?",
        "Never heard of {}.",
        "Give me a short explanation of {}.",
        "Say something about {}.",
        "{}, what is that?",
        "{}?",
        "{}",
    ),
    "whats": (
        "What are {}?",
        "What are {} in Baton?",
        "What are {} for?",
        "What exactly are {}?",
        "What do you know about {}?",
        "Which are {}?",
        "Tell me about {}.",
        "Tell me what {} are.",
        "Could you tell me what {} are?",
        "Do you know what {} are?",
        "Explain {}.",
        "Explain {} to me.",
        "Please explain {}.",
        "Can you explain {}?",
        "Can you tell me about {}?",
        "Describe {}.",
        "I want to know about {}.",
        "How do {} work?",
        "What about {}?",
        "What do {} do?",
        "What are {} good for?",
        "What is the purpose of {}?",
        "What is the role of {}?",
        "Why are there {}?",
        "Why do you have {}?",
        "Does Baton have {}?",
        "In a few words, what are {}?",
        "Could you explain what {} do?",
        "Please describe {} to me",
        "Please tell me about {}.",
        "I keep hearing about {}.",
        "Say something about {}.",
        "{}, what is that?",
        "Are there {}?",
        "{}?",
        "{}",
    ),
    "how": (
        "How do I {}?",
        "How can I {}?",
        "How to {}?",
        "How to {}",
        "How do you {}?",
        "How do we {}?",
        "How could I {}?",
        "How would I {}?",
        "How does one {}?",
        "What must I do to {}?",
        "What is the way to {}?",
        "What is the command to {}?",
        "What are the steps to {}?",
        "What is the best way to {}?",
        "Can I {}?",
        "Can you help me {}?",
        "Could you tell me how to {}?",
        "Show me how to {}.",
        "Tell me how to {}.",
        "Explain how to {}.",
        "Please explain how to {}.",
        "I want to {}.",
        "I want to {}, how does that work?",
        "I would like to {}.",
        "I need to {}.",
        "How should I {}?",
        "How can we {}?",
        "How would somebody {}?",
        "How might one {}?",
        "How is it possible to {}?",
        "Which command do I need to {}?",
        "What command lets me {}?",
        "What do I type to {}?",
        "Is there a way to {}?",
        "I am trying to {}.",
        "I'd like to {}",
        "Help me {}.",
        "Teach me how to {}.",
        "Let me {}.",
        "Instructions to {}",
        "Steps to {}?",
        "{}, how?",
        "{}",
    ),
    "why": (
        "Why {}?",
        "Why should I {}?",
        "Why should one {}?",
        "Why would you {}?",
        "Why does Baton {}?",
        "Why do you {}?",
        "What is the reason to {}?",
        "What is the point if you {}?",
        "Is there a reason to {}?",
        "Tell me why Baton would {}.",
        "Explain why one would {}.",
        "Does it make sense to {}?",
    ),
    "can": (
        "Can Baton {}?",
        "Can I {} with Baton?",
        "Could Baton {}?",
        "Does Baton {}?",
        "Will Baton {}?",
        "Is Baton able to {}?",
        "Is it possible to {} with Baton?",
        "I want to {}.",
        "I wonder whether Baton can {}.",
    ),
}

_OPENINGS = (
    "Hi, ",
    "Hi! ",
    "Hello, ",
    "Hello! ",
    "Hey, ",
    "Please, ",
    "So, ",
    "Ok, ",
    "And ",
    "Quick question: ",
    "Question: ",
    "I have a question. ",
    "Can you tell me: ",
    "Please tell me: ",
    "I am new here. ",
    "In a few words, ",
    "In short: ",
    "I was wondering: ",
    "Hello, can you help me? ",
    "Can you help me with something? ",
    "Sorry, ",
)
_CLOSINGS = (
    " Please explain.",
    " Please",
    " Thanks!",
    " Thank you.",
    " Answer briefly.",
    " Be brief.",
    " In one sentence.",
    " Explain it simply.",
    " I am curious.",
    " Explain it like I am five.",
    " in simple terms",
    " Keep it short.",
    " :)",
)
_STAND_INS = ("it", "this", "this project", "this server", "the Baton server", "baton")
_DROPPABLE = {"the", "a", "an", "is", "are", "do", "does", "of", "to", "me", "you", "i", "with", "in"}


def phrase(kind: str, topic: str) -> list[str]:
    """Return all questions about a topic. kind: a key of FRAMES."""
    questions = []
    for frame in FRAMES[kind]:
        if "Baton" in frame and "Baton" in topic:
            continue
        question = frame.format(topic)
        questions.append(question[0].upper() + question[1:])
    return questions


def reword(question: str, synonyms: Mapping[str, tuple[str, ...]], rng: Random) -> str:
    """Return the question with some words replaced by synonyms, and sometimes Baton replaced by a pronoun."""
    words = question.split(" ")
    for i, word in enumerate(words):
        stem = word.rstrip("?.,!:")
        others = synonyms.get(stem) or synonyms.get(stem.lower())
        if others and rng.random() < 0.2:
            words[i] = rng.choice(others) + word[len(stem) :]
        elif stem == "Baton" and i and rng.random() < 0.06:
            words[i] = rng.choice(_STAND_INS) + word[len(stem) :]
    reworded = " ".join(words)
    return reworded[0].upper() + reworded[1:] if question[0].isupper() else reworded


def scramble(question: str, fillers: Sequence[str], rng: Random) -> str:
    """Return the question with words added, lost or out of order, so that the model learns to go by its keywords."""
    words = question.split(" ")
    if len(words) < 3:
        return question
    if rng.random() < 0.15:
        for _ in range(rng.randint(1, 3)):
            words.insert(rng.randrange(len(words)), rng.choice(fillers))
    if rng.random() < 0.1:
        del words[rng.randrange(len(words))]
    if rng.random() < 0.06:
        rng.shuffle(words)
    return " ".join(words)


def disturb(question: str, rng: Random) -> str:
    """Return the question as a hurried person types it: other case, no question mark, a typo or a greeting first."""
    if rng.random() < 0.06:
        words = question.split(" ")
        droppable = [i for i, word in enumerate(words) if word.lower() in _DROPPABLE]
        if droppable and len(words) > 2:
            del words[rng.choice(droppable)]
            question = " ".join(words)
    if rng.random() < 0.05 and len(question) > 8:
        at = rng.randrange(1, len(question) - 2)
        swapped = question[at + 1] + question[at]
        question = question[:at] + rng.choice((swapped, question[at], question[at : at + 1] * 2)) + question[at + 2 :]
    if rng.random() < 0.15:
        question = question.rstrip("?.! ") or question
    if rng.random() < 0.07:
        question = rng.choice(_OPENINGS) + (question if rng.random() < 0.5 else question[0].lower() + question[1:])
    if rng.random() < 0.06:
        question += rng.choice(_CLOSINGS)
    case = rng.random()
    if case < 0.14:
        return question.lower()
    if case < 0.16:
        return question.upper()
    return question
