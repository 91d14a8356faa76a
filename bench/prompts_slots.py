"""What the templates of the routing bench are filled with: facts and plain words."""

from __future__ import annotations


def _list(text: str) -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in text.split(";"))


def _pairs(text: str) -> dict[str, str]:
    return dict(part.split(": ", 1) for part in _list(text))


NATIONS = _pairs(
    """France: Paris; Germany: Berlin; Italy: Rome; Spain: Madrid; Portugal: Lisbon; Norway:
    Oslo; Sweden: Stockholm; Denmark: Copenhagen; Finland: Helsinki; Iceland: Reykjavik;
    Ireland: Dublin; England: London; Scotland: Edinburgh; Wales: Cardiff; Belgium: Brussels;
    Austria: Vienna; Switzerland: Bern; Poland: Warsaw; Hungary: Budapest; Romania: Bucharest;
    Bulgaria: Sofia; Greece: Athens; Turkey: Ankara; Russia: Moscow; Ukraine: Kyiv; Serbia:
    Belgrade; Croatia: Zagreb; Slovenia: Ljubljana; Slovakia: Bratislava; Estonia: Tallinn;
    Latvia: Riga; Lithuania: Vilnius; Albania: Tirana; Malta: Valletta; Cyprus: Nicosia;
    Egypt: Cairo; Morocco: Rabat; Tunisia: Tunis; Algeria: Algiers; Libya: Tripoli; Kenya:
    Nairobi; Ethiopia: Addis Ababa; Ghana: Accra; Nigeria: Abuja; Senegal: Dakar; Uganda:
    Kampala; Rwanda: Kigali; Angola: Luanda; Zambia: Lusaka; Zimbabwe: Harare; Namibia:
    Windhoek; Botswana: Gaborone; Madagascar: Antananarivo; Somalia: Mogadishu; Sudan:
    Khartoum; Mali: Bamako; Japan: Tokyo; China: Beijing; South Korea: Seoul; North Korea:
    Pyongyang; Mongolia: Ulaanbaatar; India: New Delhi; Nepal: Kathmandu; Bangladesh: Dhaka;
    Pakistan: Islamabad; Afghanistan: Kabul; Iran: Tehran; Iraq: Baghdad; Syria: Damascus;
    Lebanon: Beirut; Jordan: Amman; Saudi Arabia: Riyadh; Qatar: Doha; Oman: Muscat; Thailand:
    Bangkok; Vietnam: Hanoi; Laos: Vientiane; Cambodia: Phnom Penh; Indonesia: Jakarta;
    Malaysia: Kuala Lumpur; the Philippines: Manila; Australia: Canberra; New Zealand:
    Wellington; Canada: Ottawa; the United States: Washington; Mexico: Mexico City; Cuba:
    Havana; Jamaica: Kingston; Haiti: Port-au-Prince; Guatemala: Guatemala City; Honduras:
    Tegucigalpa; Nicaragua: Managua; Costa Rica: San José; Panama: Panama City; Colombia:
    Bogotá; Venezuela: Caracas; Ecuador: Quito; Peru: Lima; Brazil: Brasília; Argentina:
    Buenos Aires; Chile: Santiago; Uruguay: Montevideo; Paraguay: Asunción"""
)

_CITIES = _pairs(
    """Munich: Germany; Hamburg: Germany; Cologne: Germany; Frankfurt: Germany; Lyon: France;
    Marseille: France; Bordeaux: France; Nice: France; Milan: Italy; Naples: Italy; Venice:
    Italy; Florence: Italy; Turin: Italy; Barcelona: Spain; Seville: Spain; Valencia: Spain;
    Porto: Portugal; Bergen: Norway; Gothenburg: Sweden; Krakow: Poland; Geneva: Switzerland;
    Zurich: Switzerland; Salzburg: Austria; Istanbul: Turkey; Saint Petersburg: Russia;
    Manchester: England; Liverpool: England; Glasgow: Scotland; Osaka: Japan; Kyoto: Japan;
    Hiroshima: Japan; Shanghai: China; Mumbai: India; Kolkata: India; Chennai: India; Sydney:
    Australia; Melbourne: Australia; Brisbane: Australia; Auckland: New Zealand; Toronto:
    Canada; Montreal: Canada; Vancouver: Canada; Rio de Janeiro: Brazil; Cancun: Mexico;
    Casablanca: Morocco; Lagos: Nigeria; Mombasa: Kenya; Alexandria: Egypt; Chicago: United
    States; Seattle: United States; Boston: United States; Dallas: United States; Cape Town:
    South Africa; Durban: South Africa; Dubai: United Arab Emirates"""
)
_ALIASES = {
    "United States": ("USA", "US", "America"),
    "England": ("United Kingdom", "UK", "Britain"),
    "Scotland": ("United Kingdom", "UK", "Britain"),
    "United Arab Emirates": ("UAE",),
}
CITIES = {city: (nation, _ALIASES.get(nation, ())) for city, nation in _CITIES.items()}
"""City to (country, other names of it)."""

_LANGUAGES = _pairs(
    """France: French; Germany: German; Austria: German; Italy: Italian; Spain: Spanish; Mexico:
    Spanish; Argentina: Spanish; Chile: Spanish; Cuba: Spanish; Brazil: Portuguese; Portugal:
    Portuguese; Norway: Norwegian; Sweden: Swedish; Denmark: Danish; Finland: Finnish; Poland:
    Polish; Hungary: Hungarian; Romania: Romanian; Greece: Greek; Turkey: Turkish; Russia:
    Russian; Japan: Japanese; China: Chinese, Mandarin; Thailand: Thai; Vietnam: Vietnamese;
    Egypt: Arabic; Morocco: Arabic; Iraq: Arabic; Iran: Persian, Farsi; Australia: English;
    Jamaica: English; Iceland: Icelandic; the Netherlands: Dutch"""
)
LANGUAGES = {nation: tuple(names.split(", ")) for nation, names in _LANGUAGES.items()}

CURRENCIES = _pairs(
    """Japan: yen; Mexico: peso; India: rupee; China: yuan; Russia: ruble; the United States:
    dollar; Canada: dollar; Australia: dollar; France: euro; Germany: euro; Italy: euro;
    Spain: euro; Turkey: lira; Switzerland: franc; Brazil: real; South Korea: won; Thailand:
    baht; Sweden: krona; Norway: krone; Poland: zloty; Egypt: pound; Chile: peso; Argentina:
    peso; Pakistan: rupee; South Africa: rand; Nigeria: naira; the United Kingdom: pound;
    Vietnam: dong"""
)

PLURALS = _pairs(
    """apple: apples; box: boxes; city: cities; mouse: mice; child: children; foot: feet; tooth:
    teeth; goose: geese; man: men; woman: women; knife: knives; wife: wives; leaf: leaves;
    wolf: wolves; shelf: shelves; life: lives; loaf: loaves; baby: babies; party: parties;
    story: stories; country: countries; family: families; lady: ladies; fly: flies; berry:
    berries; bus: buses; class: classes; dish: dishes; watch: watches; church: churches;
    brush: brushes; fox: foxes; tax: taxes; glass: glasses; potato: potatoes; tomato:
    tomatoes; hero: heroes; echo: echoes; book: books; table: tables; window: windows; garden:
    gardens; river: rivers; teacher: teachers; bird: birds; flower: flowers; house: houses;
    horse: horses; bridge: bridges; letter: letters; key: keys; boy: boys; toy: toys; monkey:
    monkeys; photo: photos; piano: pianos; roof: roofs; chair: chairs; lamp: lamps; doctor:
    doctors; person: people; thief: thieves; half: halves; penny: pennies; witch: witches;
    match: matches; bench: benches; lunch: lunches"""
)

_OPPOSITES = _pairs(
    """hot: cold; big: small, little; early: late; open: closed, close, shut; up: down; fast:
    slow; old: young, new; rich: poor; happy: sad, unhappy; light: dark, heavy; day: night;
    high: low; long: short; wet: dry; full: empty; hard: soft, easy; strong: weak; clean:
    dirty; loud: quiet, soft, silent; good: bad, evil; true: false; left: right; black: white;
    first: last; near: far; inside: outside; begin: end, finish; win: lose; buy: sell; give:
    take, receive; push: pull; love: hate; laugh: cry; always: never; everything: nothing;
    friend: enemy, foe; war: peace; summer: winter; north: south; east: west; above: below;
    before: after; brave: cowardly, coward, cowardice, fearful, timid, afraid; tall: short;
    thick: thin; wide: narrow; deep: shallow; smooth: rough; sharp: blunt, dull; sweet: sour,
    bitter; alive: dead; awake: asleep; simple: complex, complicated, difficult; cheap:
    expensive; polite: rude, impolite; safe: dangerous, unsafe; success: failure; entrance:
    exit; arrive: leave, depart; remember: forget; increase: decrease; positive: negative;
    public: private; ancient: modern; beautiful: ugly; possible: impossible; visible:
    invisible; honest: dishonest; birth: death"""
)
OPPOSITES = {word: tuple(right.split(", ")) for word, right in _OPPOSITES.items()}

_CHOICES = _pairs(
    """a carrot: vegetable, metal, planet; a rose: flower, bird, tool; a dog: animal, plant,
    metal; iron: metal, fruit, animal; an eagle: bird, fish, flower; a salmon: fish, bird,
    tree; a hammer: tool, fruit, planet; a banana: fruit, metal, tool; a piano: instrument,
    animal, fruit; a violin: instrument, plant, vehicle; a car: vehicle, animal, fruit; a
    train: vehicle, bird, fruit; an oak: tree, fish, tool; a tulip: flower, animal, vehicle;
    gold: metal, plant, animal; copper: metal, flower, bird; Mars: planet, fruit, vegetable;
    Jupiter: planet, tool, flower; a cow: animal, vehicle, metal; a tiger: animal, fruit,
    tool; an apple: fruit, animal, planet; a grape: fruit, tool, bird; a potato: vegetable,
    animal, vehicle; an onion: vegetable, bird, metal; a saw: tool, flower, fish; a spoon:
    tool, planet, animal; a drum: instrument, fish, vegetable; a guitar: instrument, metal,
    bird; a ship: vehicle, vegetable, tree; a bicycle: vehicle, fish, flower; a pine: tree,
    vehicle, animal; a shark: fish, fruit, instrument; a trout: fish, tool, planet; an owl:
    bird, metal, vegetable; a parrot: bird, tree, vehicle; a daisy: flower, metal, fish; an
    orchid: flower, tool, planet; silver: metal, fish, tree; Saturn: planet, animal, bird;
    Venus: planet, vegetable, vehicle; a horse: animal, tree, fruit; a cherry: fruit, vehicle,
    fish; cabbage: vegetable, planet, tool; a maple: tree, metal, bird; a flute: instrument,
    flower, animal; a screwdriver: tool, bird, tree; a pear: fruit, instrument, planet; a
    lion: animal, flower, vehicle"""
)
CHOICES = {subject: tuple(words.split(", ")) for subject, words in _CHOICES.items()}
"""Subject to (what it is, what it is not, ...)."""

THINGS = _list(
    """umbrella; lantern; basket; notebook; kettle; scarf; camera; suitcase; teapot; blanket;
    hat; ladder; bucket; clock; mirror; candle; guitar; wallet; jacket; painting"""
)
PREPOSITIONS = ("under", "behind", "beside", "near")
PLACES = _list(
    "table; door; window; bed; sofa; stove; garden wall; bookshelf; piano; gate; chair; fountain"
)
NAMES = _list(
    """Maria; Peter; Anna; Tom; Clara; Paul; Sofia; James; Emma; David; Laura; Henry; Alice;
    Martin; Julia; Robert; Nina; Samuel; Helen; Victor"""
)
TOWNS = _list(
    """Bergen; Lisbon; Leeds; Munich; Toronto; Boston; Kyoto; Geneva; Dublin; Prague; Vienna;
    Seville; Oslo; Athens; Chicago; Sydney"""
)
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "purple")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
JOBS = _list("teacher; baker; nurse; gardener; librarian; driver; painter; carpenter; cook; farmer")

SCENES = (
    "On {day}, {name} lost a {colour} {thing} at the station in {town}. It had been a present from "
    "an old friend. A {job} called {other} found the {thing} on a bench and took it to the office. "
    "The next morning, {name} came back and was very glad to have it again.",
    "{name} has lived in {town} for seven years. Last {day}, on the way home from the market, "
    "{name} lost a {colour} {thing} in the park. {other}, who works as a {job}, found the {thing} "
    "under a tree. The two of them met for a cup of tea and became friends.",
    "The museum in {town} was full of visitors on {day}. In all the noise {name} lost a {colour} "
    "{thing} near the stairs. After an hour it was found by {other}, a {job} who had come with a "
    "group of children. {name} thanked everyone and bought ice cream for the whole group.",
)
"""Passages: who loses what, where and when, and who finds it."""

STATEMENTS = (
    ("{0} lives in a small house in Madrid.", "Where does {0} live?", "Madrid"),
    ("{0} bought three apples at the market.", "What did {0} buy?", "apples"),
    ("{0} has a red bicycle.", "What color is the bicycle?", "red"),
    ("{0} is a teacher at the village school.", "What is the job of {0}?", "teacher"),
    ("{0} plays the piano every evening.", "Which instrument does {0} play?", "piano"),
    ("{0} has two dogs and a cat.", "How many dogs does {0} have?", "two"),
    ("{0} went to the beach on Friday.", "Where did {0} go?", "beach"),
    ("{0} likes soup with fresh bread.", "What does {0} like?", "soup"),
    ("The name of the new doctor is {0} Hill.", "What is the family name of the doctor?", "Hill"),
    ("{0} was born in Canada and moved to Greece.", "Where was {0} born?", "Canada"),
    ("{0} takes the bus to work.", "How does {0} go to work?", "bus"),
    ("{0} painted the kitchen green last week.", "Which room did {0} paint?", "kitchen"),
    ("{0} keeps the key in a blue box.", "What does {0} keep in the box?", "key"),
    ("{0} cooked rice for the whole family.", "What did {0} cook?", "rice"),
    ("{0} wrote a book about old ships.", "What is the book about?", "ships"),
    ("{0} sold the old car to a neighbor.", "Who bought the car?", "neighbor"),
)
"""A fact, a question about it, and the word that a right answer has."""

TOPICS = _list(
    """photosynthesis; gravity; volcanoes; rainbows; honey bees; whales; penguins; dinosaurs;
    bread; green tea; chocolate; the Moon; Mars; comets; earthquakes; electricity; magnets;
    batteries; DNA; vaccines; sleep; dreams; the human heart; chess; jazz; opera; photography;
    pottery; castles; pirates; Vikings; samurai; libraries; newspapers; poetry; fairy tales;
    maps; calendars; clocks; fractions; prime numbers; triangles; computers; the internet;
    passwords; robots; smartphones; bridges; trains; airplanes; roses; mushrooms; trees; snow;
    fog; rivers; football; tennis; the Olympic Games; coral reefs; deserts; glaciers; steam
    engines; bicycles; wind turbines; recycling; soap; candles; salt; glass; silk; olive oil"""
)
