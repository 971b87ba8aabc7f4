"""What is said: three words to a short paragraph, as telephone systems, voice agents and narrators say them."""

import re
from collections.abc import Sequence

import numpy as np

SENTENCES = (
    "Please hold on.",
    "Sure, one moment.",
    "You are next in line.",
    "Thank you for calling.",
    "Your order has been shipped.",
    "Sorry, could you say that again?",
    "I have moved the meeting to Thursday.",
    "Press one for billing, or stay on the line.",
    "The code I just sent you has six digits.",
    "Let me look that up for you right away.",
    "Your table for four is booked at half past seven.",
    "The next tram towards the harbour leaves in nine minutes.",
    "I can hear you, but the line is a little noisy today.",
    "Would you like me to read the whole list or just the first three?",
    "This call may be recorded so that we can train our staff.",
    "Your parcel is waiting at the counter until Saturday at noon.",
    "It looks like your card was declined, so let us try another one.",
    "The pharmacy on Mill Street closes at eight, but the one by the station stays open all night.",
    "I found two flights that fit: one leaves at dawn, and the other gets in just before midnight.",
    "Before I change the address, may I have the last four digits of your customer number?",
    "All of our agents are busy at the moment, and your estimated waiting time is under five minutes.",
    "Good news, the technician can come tomorrow between ten and twelve, and you do not need to be at home.",
    "If the red light keeps blinking, unplug the router, count to twenty, and plug it back in.",
    "The library will be closed on Monday for repairs, and every loan is extended by one week.",
    "Turn left after the bakery.",
    "In two hundred metres, keep right and follow the river.",
    "Your heart rate is steady, so let us add another kilometre.",
    "The soup needs ten more minutes; meanwhile, chop the parsley.",
    "Rain is expected this evening, with strong gusts along the coast and a clear, cold night to follow.",
    "The old lighthouse had not been lit for thirty years, yet the keeper still climbed its stairs each evening.",
    "She folded the letter twice, put it under the clock, and went out without locking the door.",
    "Nobody in the village could say when the mill had stopped, only that the silence had woken them all.",
    "A glacier moves so slowly that a careless eye calls it still, and so surely that whole valleys are shaped by it.",
    (
        "By the time the second lantern was lit, the boats had already turned, and the first of them was close enough "
        "for us to hear the oars."
    ),
    (
        "Welcome back. Last time we talked about how bees find their way home, and today we will follow one of them "
        "across a field that she has never seen before."
    ),
    (
        "Here is what I understood: you would like to keep your number, move to the smaller plan from next month, and "
        "get the final invoice by post. Is that right?"
    ),
    (
        "The museum opens its new wing this weekend. Admission is free on both days, children can try the printing "
        "press, and the last guided tour starts at a quarter to five."
    ),
    (
        "To reset your password, open the settings, choose security, and follow the link that we send you. The link "
        "works for fifteen minutes, and you can ask for another one at any time."
    ),
    (
        "He had walked the same road for so long that his feet knew every stone of it, and so it took him a while "
        "to notice that the road, that morning, was leading somewhere else."
    ),
    (
        "Our quarterly results are better than planned: sales grew in every region, returns fell by a third, and the "
        "new warehouse went into service two weeks early. Let us look at the numbers one by one."
    ),
)


ONE_SENTENCE = tuple(text for text in SENTENCES if not re.search(r"[.?!] ", text))


def choose(count: int, *, seed: int, texts: Sequence[str] = SENTENCES) -> list[str]:
    """`count` of `texts` in an order that depends on `seed` alone; every text comes once before any comes again."""
    generator = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < count:
        order.extend(generator.permutation(len(texts)).tolist())
    return [texts[index] for index in order[:count]]
