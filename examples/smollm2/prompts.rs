//! The built-in prompts: six kinds, seven of each.

use std::path::Path;

use anyhow::{Context, Result, ensure};

/// Kind and text.
pub const BUILT_IN: &[(&str, &str)] = &[
    ("chat", "I moved to a new town last month and I don't know anybody yet. How do I meet people?"),
    ("chat", "My bread never rises properly. What am I doing wrong?"),
    ("chat", "Why is the sky dark at night although there are so many stars?"),
    ("chat", "I have a job interview on Friday and I am nervous. Can you help me prepare?"),
    ("chat", "Explain to a child what a battery does."),
    ("chat", "Which is the better pet for a small flat, a cat or a dog?"),
    ("chat", "How does a bicycle stay upright while it is moving?"),
    ("code", "Write a Python function that returns the factorial of a number."),
    ("code", "Write a Python function that checks whether a word is a palindrome."),
    ("code", "Write a C function that swaps two integers through pointers."),
    ("code", "Write a Python class for a stack with push, pop and peek."),
    ("code", "Write a JavaScript function that sums the even numbers of an array."),
    ("code", "Write a Python function that counts how often each letter occurs in a string."),
    ("code", "Show me how to read a text file line by line in Python."),
    ("arithmetic", "A box holds 12 eggs. How many eggs are in 7 boxes? Explain step by step."),
    ("arithmetic", "Tom has 45 marbles and gives away 18. How many does he have left?"),
    ("arithmetic", "A train covers 240 kilometres in 3 hours. What is its average speed?"),
    ("arithmetic", "What is 15 percent of 200? Show how you get the answer."),
    ("arithmetic", "Anna reads 20 pages a day. How many days does she need for a book of 300 pages?"),
    ("arithmetic", "A shirt costs 25 dollars and a pair of shoes twice as much. What do both cost together?"),
    ("arithmetic", "Add 17, 26 and 9, then multiply the result by 2. Show each step."),
    (
        "summary",
        "Summarize in one sentence: The old lighthouse on the cape was switched off last week. Ships navigate by \
         satellite today, and the keeper's family had moved away years ago. The village now wants to turn the \
         tower into a small museum, but nobody knows yet who will pay for the repairs.",
    ),
    (
        "summary",
        "Summarize the following text: Honeybees tell each other where to find flowers by dancing. The angle of \
         the dance shows the direction relative to the sun, and its length shows the distance. Other bees follow \
         the dancer in the dark hive, feel her movements and then fly to the place she described.",
    ),
    (
        "summary",
        "Give the main point of this note: The meeting on Tuesday is moved to Thursday at ten. Please bring the \
         budget figures and your list of open questions. If you cannot come, send somebody who can decide.",
    ),
    (
        "summary",
        "Summarize this story in two sentences: A farmer found a wounded hawk and nursed it through the winter. \
         In spring he opened the cage, but the hawk stayed on the roof. Every morning it circled over the \
         fields, and in that year not one mouse touched the grain.",
    ),
    (
        "summary",
        "What is this text about? Concrete is made of cement, sand, gravel and water. It hardens not by drying \
         but by a chemical reaction with the water, which is why it also sets under water. Builders keep fresh \
         concrete moist for days so that it becomes strong.",
    ),
    (
        "summary",
        "Shorten this text: The library will be closed in August because the heating is being replaced. Books \
         that are due in that month can be returned until the middle of September without a fee. The reading \
         room in the town hall stays open in the mornings.",
    ),
    (
        "summary",
        "Summarize in plain words: Tides are caused mainly by the gravity of the moon, which pulls the water of \
         the oceans toward it. As the earth turns, most coasts see high water twice a day. When sun and moon \
         pull in the same direction, the tides are especially high.",
    ),
    ("list", "List five things to pack for a weekend in the mountains."),
    ("list", "Name the planets of the solar system in order."),
    ("list", "Give me three tips for sleeping better."),
    ("list", "List the ingredients of a simple vegetable soup."),
    ("list", "Write a list of ten English words that rhyme with light."),
    ("list", "List four advantages of riding a bicycle to work."),
    ("list", "Make a to-do list for planning a birthday party."),
    ("translation", "Translate into French: Where is the train station?"),
    ("translation", "Translate into Spanish: I would like a cup of coffee, please."),
    ("translation", "Translate into German: The weather is beautiful today."),
    ("translation", "Translate into Italian: My brother lives in a big city."),
    ("translation", "How do you say good morning in French, Spanish and German?"),
    ("translation", "Translate into Spanish: We will meet you at the market tomorrow morning."),
    ("translation", "Translate into French: The book is on the table next to the window."),
];

/// Prompts from a file: of a `.jsonl` file each line's `prompt` or first of `turns`, else each line itself.
pub fn from_file(path: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let prompts: Vec<String> = match path.extension().is_some_and(|ext| ext == "jsonl") {
        false => lines.map(str::to_owned).collect(),
        true => {
            let prompt = |line: &str| -> Option<String> {
                let value: serde_json::Value = serde_json::from_str(line).ok()?;
                Some(value.get("prompt").or_else(|| value.get("turns")?.get(0))?.as_str()?.to_owned())
            };
            let lines = lines.enumerate();
            let parse =
                |(i, line)| prompt(line).with_context(|| format!("{}:{}: no prompt", path.display(), i + 1));
            lines.map(parse).collect::<Result<_>>()?
        }
    };
    ensure!(!prompts.is_empty(), "{} holds no prompt", path.display());
    Ok(prompts)
}
