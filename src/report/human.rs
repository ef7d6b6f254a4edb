//! Numbers and names for people.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

/// `512 B`, `12.3 KiB`, `1.0 GiB`: one decimal from 1024 bytes on, powers of 1024.
pub fn bytes(value: f64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if value.abs() < 1023.5 {
        return format!("{value:.0} B");
    }
    let mut scaled = value / 1024.0;
    let mut unit = 0;
    // 1023.95 would be shown as 1024.0.
    while scaled.abs() >= 1023.95 && unit + 1 < UNITS.len() {
        scaled /= 1024.0;
        unit += 1;
    }
    format!("{scaled:.1} {}", UNITS[unit])
}

/// A size as it was chosen: `128 KiB`, and not rounded if it is no whole number of units.
pub fn exact_bytes(value: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units
        .into_iter()
        .find(|(shift, _)| value > 0 && value.trailing_zeros() >= *shift)
    {
        Some((shift, unit)) => format!("{} {unit}", value >> shift),
        None => format!("{} B", count(value as f64)),
    }
}

/// `1,234,567`.
pub fn count(value: f64) -> String {
    let digits = format!("{:.0}", value.max(0.0));
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A part of a whole in percent; `-` if there is no whole.
pub fn share(part: f64, whole: f64) -> String {
    if whole > 0.0 {
        format!("{:.1}%", 100.0 * part / whole)
    } else {
        "-".to_owned()
    }
}

/// Whether a terminal or a browser may obey this character: it moves the cursor, breaks a line, reorders what is around
/// it, or is none that XML allows.
pub fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{061C}' | '\u{200E}' | '\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
        || matches!(c, '\u{FFFE}' | '\u{FFFF}')
}

/// `text` with everything escaped that is unsafe to show. Names come from the target, and a terminal obeys what is in
/// them.
pub fn clean(text: &str) -> Cow<'_, str> {
    if !text.contains(is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if is_unsafe(c) {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// A duration as users may type it, rounded to what matters: `1h2m3s`, `1m30s`, `2.6s`, `15ms`.
#[derive(Debug, Clone, Copy)]
pub struct Human(pub Duration);

impl fmt::Display for Human {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.0.as_millis();
        if millis < 1000 {
            return write!(f, "{millis}ms");
        }
        if millis < 60_000 {
            let tenths = (millis + 50) / 100;
            return if tenths.is_multiple_of(10) {
                write!(f, "{}s", tenths / 10)
            } else {
                write!(f, "{}.{}s", tenths / 10, tenths % 10)
            };
        }
        let seconds = (millis + 500) / 1000;
        let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
        for (value, unit) in [(days, 'd'), (hours, 'h'), (minutes, 'm'), (seconds % 60, 's')] {
            if value > 0 {
                write!(f, "{value}{unit}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        let sizes = [0.0, 1023.4, 1023.6, 1536.0, 1023.96 * 1024.0, 5e12];
        assert_eq!(
            sizes.map(bytes),
            ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "4.5 TiB"]
        );
        assert_eq!(
            [0.0, 999.4, 1000.0, 1234567.0].map(count),
            ["0", "999", "1,000", "1,234,567"]
        );
        assert_eq!(
            [131_072, 1 << 30, 1500].map(exact_bytes),
            ["128 KiB", "1 GiB", "1,500 B"]
        );
        assert_eq!((share(1.0, 3.0), share(1.0, 0.0)), ("33.3%".to_owned(), "-".to_owned()));
    }

    #[test]
    fn names_cannot_command_the_terminal() {
        assert_eq!(clean("dir/é.py"), "dir/é.py");
        assert_eq!(clean("a\x1b[2J\nb\u{202E}"), "a\\u{1b}[2J\\nb\\u{202e}");
    }
}
