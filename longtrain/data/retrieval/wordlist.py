"""Plain words that keys of hidden facts are made of: an adjective, a hyphen, a noun."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words(
    "able amber ancient angry austere azure bashful bitter blue bold brave brief bright bronze busy "
    "calm careful civil clean "
    "clever cold coral cosmic crimson cruel curly curved daily damp dark deep dense distant dry "
    "dusty eager early earnest "
    "elder empty exact faint fair famous fancy fertile fierce firm flat foreign fragile frank fresh "
    "frosty gentle giant "
    "glad golden grand grave green grim happy hard harsh hasty heavy hollow honest humble idle "
    "ivory jolly keen kind large "
    "late lavish lazy level light little lively lonely loud loyal lucky mellow merry mighty modest "
    "narrow neat nimble "
    "noble northern obscure odd old open orange pale patient plain polite proud purple quaint quick "
    "quiet rapid rare ready "
    "red rich rigid ripe robust rough round royal rural rusty sacred sandy scarlet secret serious "
    "sharp shiny short shy "
    "silent silver simple sleepy slow small smooth sober soft solemn solid southern spare square "
    "steady steep stern still "
    "strange strong sturdy subtle sunny sweet swift tall tame tender thick thin tidy timid tiny "
    "tough tranquil true upper "
    "urban vague vast velvet violet vivid warm weary western white whole wide wild windy wise "
    "wooden yellow young"
)

NOUNS = _words(
    "actor anchor angel apple arch arrow badge banner barn basin basket beacon bear beetle bell "
    "bench berry bird blade "
    "blanket boat bottle bowl branch bread bridge brook brush bucket button cabin cable camel "
    "candle canoe canyon carpet "
    "cart castle cave cedar chain chair chapel chest circle cliff clock cloud coat compass copper "
    "corner cottage cradle "
    "crown crystal curtain daisy desert desk diamond donkey door dragon drum eagle engine falcon "
    "farm feather fence ferry "
    "field finger flag flame flute forest fountain fox garden gate glass glove goose grain grape "
    "hammer harbor harp hat "
    "hawk hedge helmet hill horn horse house island jacket jewel kettle key kite kitten ladder lake "
    "lamp lantern leaf "
    "lemon letter lily lion lizard lock magnet maple market meadow mill mirror monkey moon mountain "
    "needle nest oak oar "
    "ocean orchard otter owl paddle palace panda paper parade path peach pearl pebble pencil pepper "
    "piano pigeon pillow "
    "pine planet plate plum pocket pond pony prairie quilt rabbit raven ribbon ring river road "
    "robin rocket roof rope rose "
    "saddle sail salmon school shadow shell shield ship shore silk slipper spider spoon spring "
    "squirrel stable star stone "
    "storm stove street summit swan table teapot temple tent thistle throne tiger timber tower "
    "train tree trumpet tulip "
    "turtle valley vase village violin wagon wall walnut wharf wheel whistle willow window wing "
    "wolf wood yard"
)
