"""What an assistant says: one and two sentences, so that clients which cut text have something to cut."""

TEXTS = [
    "Good morning, how can I help you today?",
    "The train to the city leaves in 15 minutes. Please be there on time.",
    "Please leave a message after the tone.", "We will send the report on Monday evening.",
    "Your table for two is ready. Would you like to sit outside?",
    "I have found three flights to London for tomorrow morning.", "The weather will be sunny in the afternoon.",
    "Thank you for waiting. Your order has been sent.", "Can you tell me your name and your date of birth?",
    "The meeting starts at nine and ends at noon.",
    "There are two messages for you. The first one is from your brother.",
    "I am sorry, I did not understand that.", "Turn left at the next corner and walk down the street.",
    "The library is open until eight in the evening.", "Do you want me to read the whole letter to you?",
    "Your package will arrive on Friday. Somebody has to be at home.",
    "The doctor can see you on Thursday at ten.", "Let us begin with the most important question.",
    "It takes about twenty minutes to get to the station.",
    "Have a nice day, and call again if you need anything.",
]  # fmt: skip
