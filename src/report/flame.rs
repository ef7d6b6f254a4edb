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
    let mut lines: Vec<u64> = Vec::new();
    let mut places: HashMap<Vec<u32>, usize> = HashMap::default();
    let mut other = 0u64;
    for (frames, value) in stacks {
        let frames = frames.unwrap_or_default();
        if frames.is_empty() {
            other = other.saturating_add(value);
            continue;
        }
        let stack = frames.into_iter().map(|frame| texts.number(frame)).collect();
        let place = *places.entry(stack).or_insert(lines.len());
        match lines.get_mut(place) {
            Some(sum) => *sum = sum.saturating_add(value),
            None => lines.push(value),
        }
    }
    let mut stacks = vec![&[][..]; lines.len()];
    for (stack, place) in &places {
        stacks[*place] = stack;
    }
    let mut text = String::new();
    for (stack, value) in stacks.into_iter().zip(lines) {
        for (depth, number) in stack.iter().enumerate() {
            text.push_str(if depth > 0 { ";" } else { "" });
            text.push_str(texts.texts[*number as usize].as_str());
        }
        let _ = writeln!(text, " {value}");
    }
    if other > 0 {
        let _ = writeln!(text, "OTHER {other}");
    }
    text
}

/// The texts of frames, each once and numbered: a frame is on many stacks, and different ones may look the same.
#[derive(Default)]
struct Texts<'a> {
    texts: Vec<String>,
    by_frame: HashMap<StackFrame<'a>, u32>,
    by_text: HashMap<String, u32>,
}

impl<'a> Texts<'a> {
    fn number(&mut self, given: StackFrame<'a>) -> u32 {
        *self.by_frame.entry(given).or_insert_with_key(|given| {
            let text = frame(given);
            *self.by_text.entry(text).or_insert_with_key(|text| {
                self.texts.push(text.clone());
                self.texts.len() as u32 - 1
            })
        })
    }
}

fn frame(frame: &StackFrame<'_>) -> String {
    let file = plain(&frame.file);
    match frame.function {
        Some(function) => format!("{} ({file}:{})", plain(function), frame.line),
        None => format!("{file}:{}", frame.line),
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
