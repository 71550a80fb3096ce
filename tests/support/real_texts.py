"""Texts for models of vectors: a thousand of differing lengths, and pairs with grades of how near they are."""

from __future__ import annotations

from pydoc_data.topics import topics

WORDS = 400
"""Of the longest text: more than 256 tokens."""
ODD = (
    "", " ", "a", "?", "...", "42", "3.14159", "naïve café", "ÉCOLE", "straße", "日本語の文です。", "Привет, мир!",
    "مرحبا بالعالم", "🙂", "x" * 300, "http://127.0.0.1:8000/v1/embeddings?a=1&b=2", "C:\\Users\\me", "[MASK] [SEP]",
    "tab\tand\nnewline", "don't can't won't", "\u200bzero\u200bwidth", "e\u0301 and é", "1,000,000", "A.B.C.",
    "snake_case",
)  # fmt: skip
"""What tokenizers trip over."""


def texts(count: int = 1000) -> list[str]:
    """So many different texts: the odd ones, then pieces of Python's documentation of 1 to `WORDS` words, as many short
    as long by the logarithm."""
    words = " ".join(topics[name] for name in sorted(topics)).split()
    made, at = dict.fromkeys(ODD), 0
    while len(made) < count:
        length = round(WORDS ** (len(made) * 0.618034 % 1))
        made[" ".join(words[at % len(words) : at % len(words) + length])] = None
        at += length + 1
    return [*made]


PAIRS: tuple[tuple[float, str, str], ...] = (
    (5, "A man is playing a guitar.", "A man plays the guitar."),
    (5, "The cat sleeps on the sofa.", "A cat is asleep on the couch."),
    (5, "She bought a new car yesterday.", "Yesterday she purchased a new automobile."),
    (5, "The meeting was moved to Friday.", "They rescheduled the meeting for Friday."),
    (5, "Children are playing in the park.", "Kids play in the park."),
    (5, "The company raised its prices.", "Prices were increased by the company."),
    (5, "He is very happy about the result.", "The outcome makes him very glad."),
    (5, "How do I reset my password?", "What is the way to reset my password?"),
    (5, "The train arrived two hours late.", "The train came with a delay of two hours."),
    (5, "Heavy rain caused floods in the town.", "The town was flooded because of heavy rain."),
    (4, "A woman is slicing a tomato.", "A woman cuts a vegetable."),
    (4, "The boy rides his bicycle to school.", "A boy goes to school by bike every day."),
    (4, "The bank approved the loan.", "The bank agreed to lend the money last week."),
    (4, "Two dogs run across the snow.", "Two dogs are running outside in winter."),
    (4, "The recipe needs three eggs.", "You need a few eggs for this dish."),
    (4, "Scientists found water on the moon.", "Researchers report that there is ice on the moon."),
    (4, "The film received good reviews.", "Critics liked the movie and its actors."),
    (4, "He lost his keys at the beach.", "His keys are gone; he was by the sea."),
    (4, "The server returns an error for large files.", "Uploading a big file fails with an error."),
    (4, "She speaks French and German.", "She knows two foreign languages, French and German."),
    (3, "A man is playing a guitar.", "A man is playing the piano."),
    (3, "The cat sleeps on the sofa.", "The dog sleeps on the carpet."),
    (3, "The train arrived two hours late.", "The train arrived on time."),
    (3, "She bought a new car yesterday.", "She sold her old car last month."),
    (3, "The boy rides his bicycle to school.", "The girl walks to school."),
    (3, "The company raised its prices.", "The company lowered its prices."),
    (3, "How do I reset my password?", "How do I change my user name?"),
    (3, "The restaurant serves Italian food.", "The restaurant serves Chinese food."),
    (3, "He runs five miles every morning.", "He swims every evening."),
    (3, "The river is frozen in winter.", "The lake dries out in summer."),
    (2, "A man is playing a guitar.", "A band recorded a new album."),
    (2, "The bank approved the loan.", "The bank closes at five o'clock."),
    (2, "Two dogs run across the snow.", "A cat hides under a chair."),
    (2, "The recipe needs three eggs.", "Chickens lay eggs."),
    (2, "The film received good reviews.", "The cinema is closed on Mondays."),
    (2, "She speaks French and German.", "He teaches English to children."),
    (2, "Scientists found water on the moon.", "The rocket will be launched in May."),
    (2, "The doctor wrote a prescription.", "The hospital has two hundred beds."),
    (2, "The football match ended in a draw.", "The tennis player won the tournament."),
    (2, "The laptop's battery is empty.", "The phone has a new camera."),
    (1, "Children are playing in the park.", "The teacher wrote a book for adults."),
    (1, "He lost his keys at the beach.", "The hotel has a view of the sea."),
    (1, "The train arrived two hours late.", "The bicycle has a flat tyre."),
    (1, "Heavy rain caused floods in the town.", "The mayor gave a speech."),
    (1, "She bought a new car yesterday.", "The road was built by the Romans."),
    (1, "The server returns an error for large files.", "The printer is out of paper."),
    (1, "The doctor wrote a prescription.", "The writer finished her novel."),
    (1, "He runs five miles every morning.", "Breakfast is served until ten."),
    (1, "The restaurant serves Italian food.", "The supermarket sells garden tools."),
    (1, "The bank approved the loan.", "The museum bought a painting."),
    (0, "A man is playing a guitar.", "The price of oil fell sharply."),
    (0, "The cat sleeps on the sofa.", "Parliament passed the new tax law."),
    (0, "How do I reset my password?", "Volcanoes are found near plate borders."),
    (0, "The recipe needs three eggs.", "The satellite orbits the earth in ninety minutes."),
    (0, "The football match ended in a draw.", "Add a pinch of salt to the soup."),
    (0, "She speaks French and German.", "The bridge is made of steel."),
    (0, "Two dogs run across the snow.", "The committee published its annual report."),
    (0, "The film received good reviews.", "Penguins live in the southern hemisphere."),
    (0, "The laptop's battery is empty.", "The king was crowned in the twelfth century."),
    (0, "Heavy rain caused floods in the town.", "He is learning to play chess."),
)
"""(grade from 0, unrelated, to 5, the same meaning; the two sentences)."""
