//! Durations, sizes and moments as users type them: `1h30m`, `128KiB`, `-1m`.

use std::time::Duration;

/// Why a text is no duration or size; shown after the text itself by clap.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// Neither a number nor numbers with units.
    #[error("not a duration; examples: 90s, 10m, 1h30m, 500ms, 2.5 (seconds)")]
    Duration,
    /// Not a number with a unit.
    #[error("not a size; examples: 131072 (bytes), 64K, 128KiB, 1.5MiB (1 KiB = 1024 bytes)")]
    Size,
    /// Neither a duration, negative or not, nor a date with a time.
    #[error(
        "not a moment; examples: 90s (after the start), -1m (before the end), end, 2026-11-29T17:20:00Z, @1795972800"
    )]
    Moment,
    /// More than can be counted.
    #[error("too large")]
    TooLarge,
}

/// Parses `90s`, `10m`, `1h30m`, `500ms`, `2d`; a number without unit is in seconds.
pub fn parse_duration(text: &str) -> Result<Duration, UnitError> {
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(UnitError::Duration);
    }
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let (number, unit, after) = split(rest).ok_or(UnitError::Duration)?;
        let seconds = match unit {
            "d" => 86_400.0,
            "h" => 3600.0,
            "m" | "min" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" | "µs" => 1e-6,
            // Only a number alone: `1h30` could mean anything.
            "" if total.is_zero() && after.is_empty() && rest == text.trim() => 1.0,
            _ => return Err(UnitError::Duration),
        };
        let part = Duration::try_from_secs_f64(number * seconds).map_err(|_| UnitError::TooLarge)?;
        total = total.checked_add(part).ok_or(UnitError::TooLarge)?;
        rest = after;
    }
    Ok(total)
}

/// Parses a number of bytes: `131072`, `64K`, `128KiB`, `1.5M`, `1G`. Units are powers of 1024, in either case.
pub fn parse_size(text: &str) -> Result<u64, UnitError> {
    let (number, unit, after) = split(text.trim()).ok_or(UnitError::Size)?;
    let lower = unit.to_ascii_lowercase();
    let shift = match lower.strip_suffix("ib").or(lower.strip_suffix('b')).unwrap_or(&lower) {
        "" if !lower.ends_with("ib") => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(UnitError::Size),
    };
    if !after.is_empty() {
        return Err(UnitError::Size);
    }
    // Whole numbers exactly, for those beyond what a float can hold.
    let digits = text.trim().trim_end_matches(unit).trim_end();
    if let Ok(whole) = digits.parse::<u64>() {
        return whole.checked_mul(1 << shift).ok_or(UnitError::TooLarge);
    }
    let bytes = (number * (1u64 << shift) as f64).round();
    if bytes < u64::MAX as f64 {
        Ok(bytes as u64)
    } else {
        Err(UnitError::TooLarge)
    }
}

/// A leading number, the unit after it, and what follows.
fn split(text: &str) -> Option<(f64, &str, &str)> {
    let is_digit = |c: char| c.is_ascii_digit() || c == '.';
    let (number, rest) = text.split_at(text.find(|c| !is_digit(c)).unwrap_or(text.len()));
    let rest = rest.trim_start();
    let (unit, after) = rest.split_at(rest.find(is_digit).unwrap_or(rest.len()));
    Some((number.parse().ok()?, unit.trim_end(), after))
}

/// A moment of a recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// So long after the start.
    AfterStart(Duration),
    /// So long before the end.
    BeforeEnd(Duration),
    /// So long after 1970 began (UTC).
    SinceEpoch(Duration),
}

impl Moment {
    /// Time since the start in a recording that began `start` after 1970 and has this length. What is outside of it
    /// becomes its start or end.
    pub fn within(self, start: Duration, elapsed: Duration) -> Duration {
        match self {
            Self::AfterStart(time) => time.min(elapsed),
            Self::BeforeEnd(time) => elapsed.saturating_sub(time),
            Self::SinceEpoch(time) => time.saturating_sub(start).min(elapsed),
        }
    }
}

impl std::str::FromStr for Moment {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let text = text.trim();
        let moment = match text.strip_prefix('-') {
            Some(rest) => parse_duration(rest).map(Self::BeforeEnd),
            None if text == "end" => Ok(Self::BeforeEnd(Duration::ZERO)),
            None => match absolute(text) {
                Some(time) => Ok(Self::SinceEpoch(time)),
                None => parse_duration(text).map(Self::AfterStart),
            },
        };
        moment.map_err(|error| match error {
            UnitError::TooLarge => error,
            _ => UnitError::Moment,
        })
    }
}

/// `2026-11-29T17:20:00Z` (or with a space, a fraction, an offset like `+01:00`; without one it is UTC), or `@` and
/// seconds since 1970.
fn absolute(text: &str) -> Option<Duration> {
    if let Some(seconds) = text.strip_prefix('@') {
        let (seconds, unit, after) = split(seconds)?;
        return (unit.is_empty() && after.is_empty())
            .then(|| Duration::try_from_secs_f64(seconds).ok())
            .flatten();
    }
    let (date, time) = text.split_once(['T', ' '])?;
    let date = numbers::<3>(date, '-')?;
    let (time, offset_minutes) = match time.find(['Z', '+', '-']) {
        Some(place) => (&time[..place], offset_minutes(&time[place..])?),
        None => (time, 0),
    };
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let [hour, minute, second] = numbers::<3>(time, ':')?;
    let [year, month, day] = date;
    let is_date = (1970..=9999).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day);
    if !is_date || hour > 23 || minute > 59 || second > 60 || !fraction.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let minutes = (days_since_1970(year, month, day) * 24 + hour) * 60 + minute - offset_minutes;
    let fraction = Duration::try_from_secs_f64(format!("0.{fraction}").parse().ok()?).ok()?;
    Some(Duration::from_secs(u64::try_from(minutes * 60 + second).ok()?) + fraction)
}

/// `Z`, `+01:00` or `-0530`, in minutes.
fn offset_minutes(text: &str) -> Option<i64> {
    if text == "Z" {
        return Some(0);
    }
    let digits = text[1..].replace(':', "");
    let value: i64 = digits
        .parse()
        .ok()
        .filter(|_| digits.len() == 4 && !digits.starts_with(['+', '-']))?;
    let minutes = value / 100 * 60 + value % 100;
    Some(if text.starts_with('-') { -minutes } else { minutes })
}

/// So many numbers without sign.
fn numbers<const COUNT: usize>(text: &str, separator: char) -> Option<[i64; COUNT]> {
    let is_number = |part: &&str| (1..=4).contains(&part.len()) && part.bytes().all(|digit| digit.is_ascii_digit());
    let parts: Option<Vec<i64>> = text
        .split(separator)
        .map(|part| Some(part).filter(is_number)?.parse().ok())
        .collect();
    parts?.try_into().ok()
}

/// Days from 1970-01-01 to a date of the Gregorian calendar, from 1970 on.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    // Years that begin in March have the leap day at their end; 719468 days are from March of year 0 to 1970.
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1 - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        for (text, millis) in [
            ("10m", 600_000),
            ("90s", 90_000),
            ("1h30m", 5_400_000),
            ("500ms", 500),
            ("2.5", 2500),
            ("60", 60_000),
            (" 1h 2m 3s ", 3_723_000),
            ("2d", 172_800_000),
            ("1.5h", 5_400_000),
            ("0", 0),
            ("5min", 300_000),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in [
            "", "s", "1x", "-5s", "1h30", "5 5", "1e3", "1.2.3s", "inf", "nan", "10M", "0s5",
        ] {
            assert_eq!(parse_duration(text), Err(UnitError::Duration), "{text}");
        }
        assert_eq!(parse_duration("99999999999999999999d"), Err(UnitError::TooLarge));
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("131072", 131_072),
            ("128KiB", 131_072),
            ("64K", 65_536),
            ("64kb", 65_536),
            ("1MiB", 1 << 20),
            ("1.5 M", 3 << 19),
            ("1G", 1 << 30),
            ("2TiB", 2 << 40),
            ("1", 1),
            ("512B", 512),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "K", "-1", "1x", "1Ki", "1iB", "1K5", "1K1K", "1 2"] {
            assert_eq!(parse_size(text), Err(UnitError::Size), "{text}");
        }
        assert_eq!(parse_size("99999999T"), Err(UnitError::TooLarge));
    }

    #[test]
    fn moments() {
        let of = |text: &str| {
            text.parse::<Moment>()
                .unwrap()
                .within(Duration::from_secs(1_600_000_000), Duration::from_secs(100))
                .as_secs()
        };
        assert_eq!(
            ["90s", "1m", "-1m", "-0", "end", "5m", "-5m", "0"].map(of),
            [90, 60, 40, 100, 100, 100, 0, 0]
        );
        let absolute = [
            "2020-09-13T12:26:50Z",
            "2020-09-13 12:26:50.9",
            "2020-09-13T14:27:00.000+02:00",
            "2020-09-13T06:57:00-0530",
            "@1600000030.5",
            "2019-01-01T00:00:00Z",
            "9999-12-31T23:59:59Z",
        ];
        assert_eq!(absolute.map(of), [10, 10, 20, 20, 30, 0, 100]);
        for text in [
            "--1m",
            "",
            "@",
            "@5m",
            "yesterday",
            "2020-13-01T00:00:00Z",
            "2020-09-13",
            "2020-09-13T1:2",
            "1970-01-01T00:00:00+0100",
        ] {
            assert_eq!(text.parse::<Moment>(), Err(UnitError::Moment), "{text}");
        }
    }

    #[test]
    fn days_of_the_calendar() {
        let days = [(1970, 1, 1), (1972, 2, 29), (2000, 3, 1), (2100, 3, 1), (2026, 11, 29)];
        assert_eq!(
            days.map(|(y, m, d)| days_since_1970(y, m, d)),
            [0, 789, 11_017, 47_541, 20_786]
        );
    }

    #[test]
    fn durations_are_shown_as_they_are_typed() {
        for (millis, text) in [
            (0, "0ms"),
            (15, "15ms"),
            (2600, "2.6s"),
            (3000, "3s"),
            (90_000, "1m30s"),
            (3_723_000, "1h2m3s"),
            (59_999, "60s"),
        ] {
            let duration = Duration::from_millis(millis);
            assert_eq!(crate::report::human::Human(duration).to_string(), text);
            assert!(parse_duration(text).unwrap().abs_diff(duration) < Duration::from_millis(100));
        }
    }
}
