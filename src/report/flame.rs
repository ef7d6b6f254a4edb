//! Collapsed stacks, the input of flame graph tools: `outermost;...;innermost VALUE`, a line for each stack.
//!
//! A frame is `function (file:line)` where the function is known and `file:line` where it is not. Stacks that look the
//! same are one line. What has no stack is in a last line `OTHER`.

use std::collections::HashMap;
use std::fmt::Write;

use super::human::is_unsafe;
use crate::profile::model::StackFrame;

/// The text for stacks (outermost frame first, `None` or empty if unknown) with their values, in the order given.
pub fn collapsed<'a>(stacks: impl IntoIterator<Item = (Option<Vec<StackFrame<'a>>>, u64)>) -> String {
    let mut lines: Vec<(String, u64)> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut other = 0u64;
    for (frames, value) in stacks {
        let stack = frames
            .unwrap_or_default()
            .iter()
            .map(frame)
            .collect::<Vec<_>>()
            .join(";");
        if stack.is_empty() {
            other = other.saturating_add(value);
        } else if let Some(place) = places.get(&stack) {
            lines[*place].1 = lines[*place].1.saturating_add(value);
        } else {
            places.insert(stack.clone(), lines.len());
            lines.push((stack, value));
        }
    }
    let mut text = String::new();
    for (stack, value) in &lines {
        let _ = writeln!(text, "{stack} {value}");
    }
    if other > 0 {
        let _ = writeln!(text, "OTHER {other}");
    }
    text
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
