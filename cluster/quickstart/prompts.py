"""What people ask in the sampled conversations: topics, questions and follow-ups.

It only combines strings; it does not know which model answers.
"""

from __future__ import annotations

import random

TOPICS = tuple(
    topic.strip()
    for topic in """
bread; growing tomatoes; learning to swim; the water cycle; photosynthesis; black holes;
volcanoes; the French Revolution; the Roman Empire; the Silk Road; the printing press; steam
engines; bicycles; electric cars; solar panels; wind turbines; recycling; composting; honey
bees; whales; penguins; octopuses; dinosaurs; wolves; house cats; training a puppy; horses;
butterflies; earthworms; coral reefs; rainforests; deserts; glaciers; earthquakes; hurricanes;
rainbows; the seasons; the Moon; Mars; comets; gravity; magnets; electricity; batteries; light
bulbs; radio waves; atoms; chemical bonds; acids and bases; DNA; vaccines; the immune system;
the human heart; sleep; dreams; healthy breakfasts; vegetarian cooking; making soup; baking
cookies; coffee; green tea; chocolate; cheese; olive oil; spices; rice; pasta sauce; pizza;
salads; picnics; camping; hiking; running a marathon; yoga; meditation; stress; headaches; back
pain; first aid; washing hands; brushing teeth; saving money; budgets; credit cards; inflation;
taxes; starting a small business; job interviews; writing a resume; time management; public
speaking; negotiation; teamwork; remote work; email etiquette; friendship; parenting; teaching
children to read; bedtime stories; board games; chess; playing the guitar; the piano; jazz;
opera; painting with watercolors; drawing faces; photography; pottery; knitting; sewing;
woodworking; painting a room; fixing a leaky tap; choosing a mattress; moving to a new city;
buying a used car; travel to Japan; visiting Paris; the Grand Canyon; the Amazon river;
Antarctica; Iceland; ancient Egypt; the Maya; Vikings; samurai; pirates; castles; the Great Wall
of China; the Apollo missions; the Industrial Revolution; World War I; democracy; constitutions;
human rights; the United Nations; newspapers; libraries; poetry; Shakespeare; fairy tales;
science fiction; detective novels; grammar; learning Spanish; sign language; maps; compasses;
calendars; clocks; fractions; prime numbers; probability; averages; triangles; the Pythagorean
theorem; algebra; statistics; computers; the internet; passwords; phishing emails; backups;
spreadsheets; search engines; artificial intelligence; robots; video games; smartphones; open
source software; the Linux command line; text files; Python lists; Python dictionaries; sorting
numbers; reading a CSV file; recursion; databases; SQL queries; regular expressions; web pages;
HTML forms; unit tests; version control; debugging; cloud computing; bridges; skyscrapers;
trains; airplanes; ships; traffic jams; city parks; gardens; roses; mushrooms; trees; autumn
leaves; snow; fog; rivers; lakes; beaches; fishing; sailing; surfing; football; basketball;
tennis; the Olympic Games; skiing; climbing; dancing; theater; movies; birthdays; weddings; New
Year; holidays with children; gift ideas; house plants; aquariums; bird watching; astronomy for
beginners; weather forecasts; recycling glass; paper; plastics; steel; glass; cotton; silk;
leather; soap; perfume; candles; salt; sugar; water; air; fire; insulation; heating a house;
refrigerators; washing machines; microwave ovens; glasses; hearing; the brain; memory; habits;
curiosity; kindness
""".replace("\n", " ").split(";")
)

QUESTIONS = (
    "What is {0}?",
    "What should I know about {0}?",
    "Explain {0} to a ten-year-old.",
    "Can you explain {0} in simple terms?",
    "Give me five interesting facts about {0}.",
    "Give me three tips about {0}.",
    "I am curious about {0}. Where should I start?",
    "Why does {0} matter?",
    "What are the most common misconceptions about {0}?",
    "Write a short story about {0}.",
    "Write a short poem about {0}.",
    "Write a friendly email to a colleague about {0}.",
    "List the pros and cons of {0}.",
    "How has {0} changed over the last hundred years?",
    "What is the history of {0}?",
    "Describe {0} in one paragraph.",
    "Write a dialogue between two friends about {0}.",
    "What are good questions to ask an expert about {0}?",
    "Make a plan for a weekend workshop on {0}.",
    "Summarize what beginners need to know about {0} in a bulleted list.",
    "Help me prepare a two-minute talk about {0}.",
    "What is the difference between {0} and {1}?",
    "How could {0} be connected to {1}?",
    "Compare {0} with {1}.",
    "My friend asked me about {0} and I did not know what to say. What would you answer?",
    "I can read a book about {0} or one about {1}. Which one do you suggest, and why?",
    "Write step-by-step instructions for someone who is new to {0}.",
    "What mistakes do people make with {0}?",
    "What would happen if {0} did not exist?",
    "Write a Python program that prints a small quiz about {0}.",
    "Write a Python function that stores notes about {0} in a dictionary.",
    "Write three quiz questions about {0} with their answers.",
    "Tell me something surprising about {0}.",
    "Who are the people who work with {0}, and what do they do?",
    "Translate your knowledge of {0} into advice for an elderly neighbor.",
    "Write a product review that mentions {0}.",
    "Write a diary entry of someone who loves {0}.",
    "What tools or materials do I need for {0}?",
    "How much does {0} cost, and how can I save money?",
    "Is {0} safe for children?",
)

DOCUMENTS = (
    "Write a long, detailed article about {0}. Use several sections with headings.",
    "Write a detailed essay of about 1000 words about {0} and {1}.",
    "Write a complete chapter of a textbook on {0}, with examples.",
    "Write a long story in which {0} and {1} play an important role.",
    "Write a detailed guide to {0} for beginners, from the basics to advanced ideas.",
    "Write a long report on {0}: background, present state, problems and outlook.",
)

FOLLOW_UPS = (
    "Can you give me an example?",
    "Please explain that in simpler words.",
    "Thank you. What else should I know?",
    "Why is that?",
    "Could you say that in one sentence?",
    "What is the most important point, and why?",
    "Can you turn this into a short list?",
    "I do not agree with the last point. What is the other side?",
    "And how is this related to {0}?",
    "Interesting! Now tell me about {0} instead.",
    "Now write the same for {0}.",
    "How would you explain this to a child?",
    "What should I do first?",
    "Can you write a short poem about it?",
    "What could go wrong?",
    "Summarize our conversation so far.",
    "Give me a title for that.",
    "Are you sure? Please check the details.",
    "How do I find more information about this?",
    "Could you make the answer longer and add details?",
)


def question(rng: random.Random) -> str:
    """One opening question of a chat."""
    return _fill(rng, QUESTIONS)


def document_request(rng: random.Random) -> str:
    """One request for a text of many paragraphs."""
    return _fill(rng, DOCUMENTS)


def follow_up(rng: random.Random) -> str:
    """One later question of a chat, which makes sense after any answer."""
    return _fill(rng, FOLLOW_UPS)


def _fill(rng: random.Random, templates: tuple[str, ...]) -> str:
    return rng.choice(templates).format(*rng.sample(TOPICS, 2))
