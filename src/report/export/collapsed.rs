//! Collapsed stacks of an export, largest first; see [`crate::report::flame`].

use super::{Export, Metric};

/// The text. Stacks that look the same are one line, what has no stack is in a last line `OTHER`.
pub fn collapsed(export: &Export<'_>, metric: Metric) -> String {
    let values = export.whole(metric);
    let mut stacks: Vec<_> = values
        .into_iter()
        .zip(&export.traces)
        .filter(|(value, _)| *value > 0)
        .collect();
    stacks.sort_by_key(|(value, trace)| (std::cmp::Reverse(*value), trace.index));
    crate::report::flame::collapsed(
        stacks
            .into_iter()
            .map(|(value, trace)| (Some(trace.frames.clone()), value)),
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assert_clean, evil, sample};
    use super::*;

    #[test]
    fn largest_first() {
        assert_eq!(
            collapsed(&sample(), Metric::LiveBytes),
            "main (app.py:3);grow (leak.py:7) 1000\nmain (app.py:3);grow (leak.py:9) 500\nold.py:0 50\nOTHER 101\n"
        );
        assert!(collapsed(&sample(), Metric::AllocBytes).starts_with("main (app.py:3);grow (leak.py:7) 2000\n"));
    }

    #[test]
    fn a_name_cannot_break_a_line_or_a_stack() {
        let text = collapsed(&evil(), Metric::LiveBytes);
        assert_clean(&text);
        assert_eq!(text.lines().count(), 8);
        for line in text.lines() {
            let (stack, value) = line.rsplit_once(' ').unwrap();
            assert_eq!((stack.split(';').count(), value), (3, "100"), "{line}");
        }
    }
}
