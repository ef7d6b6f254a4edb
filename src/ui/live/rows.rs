//! From a [`Picture`] to the lines of the table: stacks grouped, sorted and filtered, and the callers below a line that is
//! opened.

use super::watch::{Amount, Picture, Watch};
use crate::collect::tree::NamedFrame;
use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Callers that are shown below one line; the rest is one line.
const MAX_CALLERS: usize = 20;
/// Stacks that are taken apart below an opened line, the largest first; the rest is one line.
const MAX_OPENED: usize = 2000;
/// Levels that are opened at once while there is only one caller.
const AT_ONCE: usize = 12;

/// What makes a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Group {
    /// The allocating line.
    #[default]
    Line,
    /// The allocating function.
    Function,
    /// Its file.
    File,
    /// The allocating thread.
    Thread,
}

impl Group {
    /// All, in the order in which a key goes through them.
    pub const ALL: [Self; 4] = [Self::Line, Self::Function, Self::File, Self::Thread];

    /// In a word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Line => "line",
            Self::Function => "function",
            Self::File => "file",
            Self::Thread => "thread",
        }
    }

    /// The next one.
    #[must_use]
    pub fn next(self) -> Self {
        let place = Self::ALL.iter().position(|group| *group == self).unwrap_or(0);
        Self::ALL[(place + 1) % Self::ALL.len()]
    }
}

/// A column to sort by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Column {
    /// Live bytes; the change in them when there is a baseline.
    #[default]
    Live,
    /// Growth a minute.
    Growth,
    /// Live objects.
    Objects,
    /// Bytes allocated a second.
    Rate,
    /// Mean age of what is alive.
    Age,
}

impl Column {
    /// All, as they stand in the table.
    pub const ALL: [Self; 5] = [Self::Live, Self::Growth, Self::Objects, Self::Rate, Self::Age];

    /// The next to the right.
    #[must_use]
    pub fn next(self) -> Self {
        let place = Self::ALL.iter().position(|column| *column == self).unwrap_or(0);
        Self::ALL[(place + 1) % Self::ALL.len()]
    }

    /// The next to the left.
    #[must_use]
    pub fn previous(self) -> Self {
        let place = Self::ALL.iter().position(|column| *column == self).unwrap_or(0);
        Self::ALL[(place + Self::ALL.len() - 1) % Self::ALL.len()]
    }

    fn value(self, amount: &Amount, has_baseline: bool) -> f64 {
        match self {
            Self::Live if has_baseline => amount.since.value,
            Self::Live => amount.live.bytes,
            Self::Growth => amount.growth.value,
            Self::Objects if has_baseline => amount.objects_since,
            Self::Objects => amount.live.objects,
            Self::Rate => amount.allocated,
            Self::Age => amount.age().unwrap_or(-1.0),
        }
    }
}

/// What the user has chosen to see.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    /// What makes a row.
    pub group: Group,
    /// Sort by this.
    pub sort: Column,
    /// The least first.
    pub is_reverse: bool,
    /// Only rows with this text, in either case.
    pub filter: String,
    /// Lines of which the callers are shown.
    pub opened: HashSet<u64>,
}

/// A line of the table.
#[derive(Debug, Clone)]
pub struct Line {
    /// The same for the same place at all times.
    pub key: u64,
    /// Whether it can be opened.
    pub has_callers: bool,
    /// Whether it is.
    pub is_open: bool,
    /// Its level: 0 is a row, 1 a caller of its allocations …
    pub level: usize,
    /// Place and name, as the target has them: not fit for a terminal.
    pub label: String,
    /// The place that it is a line of.
    pub frame: Option<NamedFrame>,
    /// How much.
    pub amount: Amount,
    /// Its stacks.
    pub stacks: Vec<u32>,
}

/// The lines, and what they leave out.
#[derive(Debug, Clone, Default)]
pub struct Lines {
    /// In order.
    pub lines: Vec<Line>,
    /// Rows.
    pub rows: usize,
    /// Rows without the filter.
    pub all_rows: usize,
}

/// `file:line function`, as the target says.
#[must_use]
pub fn label(frame: &NamedFrame) -> String {
    if frame.line == 0 && frame.file == frame.function {
        return frame.file.to_string();
    }
    format!("{}:{} {}", frame.file, frame.line, frame.function)
}

/// The lines of a picture; frames come from `watch`.
#[must_use]
pub fn lines(picture: &Picture, choice: &Choice, watch: &Watch) -> Lines {
    let mut rows = rows(picture, choice.group);
    let all_rows = rows.len();
    let wanted = choice.filter.to_lowercase();
    if !wanted.is_empty() {
        rows.retain(|row| row.label.to_lowercase().contains(&wanted));
    }
    let has_baseline = picture.baseline.is_some();
    sort(&mut rows, choice, has_baseline);
    let amounts: HashMap<u32, &Amount> = if choice.opened.is_empty() {
        HashMap::new()
    } else {
        picture
            .stacks
            .iter()
            .map(|stack| (stack.number, &stack.amount))
            .collect()
    };
    let mut found = Lines {
        rows: rows.len(),
        all_rows,
        lines: Vec::with_capacity(rows.len()),
    };
    for mut row in rows {
        row.is_open = choice.opened.contains(&row.key);
        let opened = row.is_open.then(|| (row.key, row.stacks.clone()));
        found.lines.push(row);
        if let Some((key, mut stacks)) = opened {
            let bytes = |number: &u32| amounts.get(number).map_or(0.0, |amount| amount.live.bytes);
            stacks.sort_by(|a, b| bytes(b).total_cmp(&bytes(a)).then(a.cmp(b)));
            let tree = Callers {
                watch,
                choice,
                has_baseline,
                amounts: &amounts,
                frames: stacks
                    .iter()
                    .take(MAX_OPENED)
                    .map(|number| (*number, watch.frames(*number).collect()))
                    .collect(),
            };
            let rest = stacks.split_off(stacks.len().min(MAX_OPENED));
            tree.below(key, &stacks, tree.first_level(), 1, AT_ONCE, &mut found.lines);
            tree.rest(key, &rest, 1, &mut found.lines);
        }
    }
    found
}

fn rows(picture: &Picture, group: Group) -> Vec<Line> {
    let mut rows: Vec<Line> = Vec::new();
    let mut places: HashMap<(&str, u32, &str), usize> = HashMap::new();
    for stack in &picture.stacks {
        let leaf = &stack.leaf;
        let key = match group {
            Group::Line => (&*leaf.file, leaf.line, &*leaf.function),
            Group::Function => (&*leaf.file, 0, &*leaf.function),
            Group::File => (&*leaf.file, 0, ""),
            Group::Thread => (stack.thread.as_deref().unwrap_or("<thread not known>"), 0, ""),
        };
        let place = *places.entry(key).or_insert_with(|| {
            rows.push(Line {
                key: hash(&(group.name(), key)),
                has_callers: true,
                is_open: false,
                level: 0,
                label: match group {
                    Group::Line => label(leaf),
                    Group::Function if leaf.file != leaf.function => format!("{} {}", leaf.file, leaf.function),
                    _ => key.0.to_owned(),
                },
                frame: (group == Group::Line).then(|| leaf.clone()),
                amount: Amount::default(),
                stacks: Vec::new(),
            });
            rows.len() - 1
        });
        rows[place].amount.add(&stack.amount);
        rows[place].stacks.push(stack.number);
    }
    rows
}

fn sort(lines: &mut [Line], choice: &Choice, has_baseline: bool) {
    let value = |line: &Line| choice.sort.value(&line.amount, has_baseline);
    lines.sort_by(|a, b| {
        let order = value(b).total_cmp(&value(a));
        let order = if choice.is_reverse { order.reverse() } else { order };
        order.then_with(|| a.label.cmp(&b.label))
    });
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// What is needed to take the stacks of a row apart.
struct Callers<'a> {
    watch: &'a Watch,
    choice: &'a Choice,
    has_baseline: bool,
    amounts: &'a HashMap<u32, &'a Amount>,
    /// Innermost first.
    frames: HashMap<u32, Vec<&'a NamedFrame>>,
}

impl Callers<'_> {
    /// A row by line stands for the innermost frame; the others do not, so that frame is shown below them.
    fn first_level(&self) -> usize {
        usize::from(self.choice.group == Group::Line)
    }

    /// Adds the lines below the line `key`: of its stacks those frames that are `depth` from the innermost.
    fn below(&self, key: u64, stacks: &[u32], depth: usize, level: usize, at_once: usize, out: &mut Vec<Line>) {
        let mut callers: Vec<Line> = Vec::new();
        let mut places: HashMap<&NamedFrame, usize> = HashMap::new();
        for number in stacks {
            let Some(frames) = self.frames.get(number) else {
                continue;
            };
            let (Some(frame), Some(amount)) = (frames.get(depth), self.amounts.get(number)) else {
                continue;
            };
            let place = *places.entry(frame).or_insert_with(|| {
                callers.push(Line {
                    key: hash(&(key, &frame.file, frame.line, &frame.function)),
                    has_callers: false,
                    is_open: false,
                    level,
                    label: label(frame),
                    frame: Some((*frame).clone()),
                    amount: Amount::default(),
                    stacks: Vec::new(),
                });
                callers.len() - 1
            });
            callers[place].amount.add(amount);
            callers[place].stacks.push(*number);
            callers[place].has_callers |= frames.len() > depth + 1;
        }
        sort(&mut callers, self.choice, self.has_baseline);
        let rest: Vec<u32> = callers
            .iter()
            .skip(MAX_CALLERS)
            .flat_map(|caller| caller.stacks.clone())
            .collect();
        callers.truncate(MAX_CALLERS);
        let is_only = callers.len() == 1 && at_once > 0;
        for mut caller in callers {
            // An only caller is opened by itself, unless the user has closed it: a key turns it over.
            caller.is_open = caller.has_callers && (is_only != self.choice.opened.contains(&caller.key));
            let opened = caller.is_open.then(|| (caller.key, caller.stacks.clone()));
            out.push(caller);
            if let Some((key, stacks)) = opened {
                self.below(key, &stacks, depth + 1, level + 1, at_once.saturating_sub(1), out);
            }
        }
        self.rest(key, &rest, level, out);
    }

    /// The line of those that are not shown.
    fn rest(&self, key: u64, stacks: &[u32], level: usize, out: &mut Vec<Line>) {
        if stacks.is_empty() {
            return;
        }
        let mut amount = Amount::default();
        for number in stacks {
            amount.add(self.amounts.get(number).copied().unwrap_or(&Amount::default()));
        }
        out.push(Line {
            key: hash(&(key, "rest")),
            has_callers: false,
            is_open: false,
            level,
            label: format!("({} further stacks)", self.watch.different(stacks)),
            frame: None,
            amount,
            stacks: stacks.to_vec(),
        });
    }
}

#[cfg(test)]
#[path = "rows_tests.rs"]
mod tests;
