//! Text from the target in cells of a terminal.

use crate::report::human::is_unsafe;
use unicode_width::UnicodeWidthChar;

/// `text` in at most `columns` columns, cut with an ellipsis at its end. What a terminal may obey, and what has no width of its own
/// (combining characters would pile up in one cell), is escaped.
#[must_use]
pub fn fit(text: &str, columns: usize) -> String {
    cut(text.chars(), columns).0
}

/// The same, cut at its beginning: of a path the end says most.
#[must_use]
pub fn fit_end(text: &str, columns: usize) -> String {
    let (whole, is_whole) = cut(text.chars(), columns);
    if is_whole || columns == 0 {
        return whole;
    }
    // From its end as many characters as fit; a text of megabytes is not gone through.
    let mut shown: Vec<String> = Vec::new();
    let mut used = 1;
    for c in text.chars().rev() {
        let (piece, width) = neutral(c);
        if used + width > columns {
            break;
        }
        used += width;
        shown.push(piece);
    }
    std::iter::once("…".to_owned()).chain(shown.into_iter().rev()).collect()
}

/// As much as fits, and whether that is all.
fn cut(chars: impl Iterator<Item = char>, columns: usize) -> (String, bool) {
    let mut out = String::new();
    let mut used = 0;
    // Where to cut so that an ellipsis fits.
    let mut last = 0;
    for c in chars {
        let (piece, width) = neutral(c);
        if used + width > columns {
            out.truncate(last);
            if columns > 0 {
                out.push('…');
            }
            return (out, false);
        }
        used += width;
        out.push_str(&piece);
        if used < columns {
            last = out.len();
        }
    }
    (out, true)
}

/// A character as it may be shown, and its columns.
fn neutral(c: char) -> (String, usize) {
    match c.width() {
        Some(width @ 1..) if !is_unsafe(c) => (c.to_string(), width),
        _ => {
            let escaped: String = c.escape_unicode().collect();
            let width = escaped.len();
            (escaped, width)
        }
    }
}

/// Columns that a text takes that [`fit`] made.
#[must_use]
pub fn width(text: &str) -> usize {
    text.chars().filter_map(UnicodeWidthChar::width).sum()
}

/// `count` values evenly taken, or all if there are no more.
#[must_use]
pub fn resample(values: &[f64], count: usize) -> Vec<f64> {
    if values.len() <= count {
        return values.to_vec();
    }
    let last = values.len() - 1;
    (0..count)
        .map(|place| values[if count > 1 { place * last / (count - 1) } else { last }])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_take_the_columns_that_they_may() {
        assert_eq!(fit("short", 5), "short");
        assert_eq!(fit("longer", 5), "long…");
        assert_eq!(fit_end("/srv/app/x.py:3 f", 8), "….py:3 f");
        assert_eq!(fit_end("/srv/app/x.py:3 f", 9), "…x.py:3 f");
        assert_eq!((fit("ab", 0), fit_end("ab", 0)), (String::new(), String::new()));
        for columns in 0..40 {
            for text in [
                "日本語のファイル.py:1 関数",
                "a\x1b[2J\u{301}\u{301}b\n",
                "plain/path.py:10 name",
                "\u{200d}\u{fe0f}👩",
            ] {
                assert!(width(&fit(text, columns)) <= columns, "{text:?} {columns}");
                assert!(width(&fit_end(text, columns)) <= columns, "{text:?} {columns}");
            }
        }
    }

    #[test]
    fn nothing_that_a_terminal_obeys_or_piles_up() {
        let hostile = "x\x1b]0;t\x07\u{9b}2J\r\n\u{202e}\u{301}\u{300}\u{200d}\u{feff}\u{ad}";
        let shown = fit(hostile, 200);
        assert!(
            shown.chars().all(|c| c.width().unwrap_or(0) > 0 && !is_unsafe(c)),
            "{shown:?}"
        );
        assert!(
            shown.starts_with("x\\u{1b}]0;t\\u{7}\\u{9b}2J\\u{d}\\u{a}\\u{202e}\\u{301}"),
            "{shown}"
        );
    }

    #[test]
    fn values_are_taken_evenly_with_both_ends() {
        assert_eq!(resample(&[1.0, 2.0], 3), [1.0, 2.0]);
        assert_eq!(resample(&[1.0, 2.0, 3.0, 4.0, 5.0], 3), [1.0, 3.0, 5.0]);
        assert_eq!(resample(&[1.0, 2.0, 3.0], 1), [3.0]);
    }
}
