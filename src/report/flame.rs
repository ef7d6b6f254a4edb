//! Collapsed stacks, the input of flame graph tools: `outermost;...;innermost VALUE`, a line for each stack.
//!
//! A frame is `function (file:line)` where the function is known and `file:line` where it is not. Stacks that look the
//! same are one line. What has no stack is in a last line `OTHER`.

use std::fmt::Write;

use foldhash::HashMap;

use super::human::is_unsafe;
use crate::profile::model::StackFrame;

/// The text for stacks (outermost frame first, `None` or empty if unknown) with their values, in the order given.
pub fn collapsed<'a>(stacks: impl IntoIterator<Item = (Option<Vec<StackFrame<'a>>>, u64)>) -> String {
    let mut texts = Texts::default();
    let mut by_frame: HashMap<StackFrame<'a>, u32> = HashMap::default();
    let mut sums = Sums::default();
    for (frames, value) in stacks {
        let numbers = frames.into_iter().flatten().map(|frame| {
            *by_frame
                .entry(frame)
                .or_insert_with_key(|frame| texts.number(&frame.file, frame.line, frame.function))
        });
        sums.add(numbers, value);
    }
    sums.text(&texts)
}

/// The texts of frames, each once and numbered: different frames may look the same.
#[derive(Debug, Default)]
pub(crate) struct Texts {
    texts: Vec<String>,
    numbers: HashMap<String, u32>,
}

impl Texts {
    /// The number of a frame's text.
    pub(crate) fn number(&mut self, file: &str, line: u32, function: Option<&str>) -> u32 {
        *self
            .numbers
            .entry(frame(file, line, function))
            .or_insert_with_key(|text| {
                self.texts.push(text.clone());
                self.texts.len() as u32 - 1
            })
    }
}

/// Values of stacks, those that look the same added up.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    values: Vec<u64>,
    /// Stacks as numbers of [`Texts`], and which value is theirs.
    places: HashMap<Vec<u32>, usize>,
    other: u64,
}

impl Sums {
    /// Adds a stack, outermost frame first.
    pub(crate) fn add(&mut self, stack: impl Iterator<Item = u32>, value: u64) {
        let stack: Vec<u32> = stack.collect();
        if stack.is_empty() {
            self.other = self.other.saturating_add(value);
            return;
        }
        let place = *self.places.entry(stack).or_insert(self.values.len());
        match self.values.get_mut(place) {
            Some(sum) => *sum = sum.saturating_add(value),
            None => self.values.push(value),
        }
    }

    /// A line for each stack, in the order in which they were added first.
    pub(crate) fn text(&self, texts: &Texts) -> String {
        let mut stacks = vec![&[][..]; self.values.len()];
        for (stack, place) in &self.places {
            stacks[*place] = stack;
        }
        let mut text = String::new();
        for (stack, value) in stacks.into_iter().zip(&self.values) {
            for (depth, number) in stack.iter().enumerate() {
                text.push_str(if depth > 0 { ";" } else { "" });
                text.push_str(&texts.texts[*number as usize]);
            }
            let _ = writeln!(text, " {value}");
        }
        if self.other > 0 {
            let _ = writeln!(text, "OTHER {}", self.other);
        }
        text
    }
}

fn frame(file: &str, line: u32, function: Option<&str>) -> String {
    let file = plain(file);
    match function {
        Some(function) => format!("{} ({file}:{line})", plain(function)),
        None => format!("{file}:{line}"),
    }
}

/// A name without what separates frames and lines.
fn plain(name: &str) -> String {
    name.chars()
        .map(|c| match c {
            ';' => ',',
            c if is_unsafe(c) => ' ',
            c => c,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_for_each_stack() {
        let frame = |file: &'static str, line, function| StackFrame {
            file: file.into(),
            line,
            function,
        };
        let stacks = [
            (
                Some(vec![frame("app.py", 10, Some("main")), frame("a;b\n.py", 0, None)]),
                5,
            ),
            (Some(vec![]), 2),
            (Some(vec![frame("x y.py", 1, None)]), 7),
            (
                Some(vec![frame("app.py", 10, Some("main")), frame("a,b .py", 0, None)]),
                6,
            ),
            (None, 1),
        ];
        assert_eq!(
            collapsed(stacks),
            "main (app.py:10);a,b .py:0 11\nx y.py:1 7\nOTHER 3\n"
        );
        assert_eq!(collapsed([]), "");
    }
}
