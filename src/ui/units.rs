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
    /// No moment.
    #[error(
        "not a moment; examples: 90s (after the start), -1m (before the end), end, 2026-01-31T12:00:00Z, @1769860800"
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
    /// So long after 1970-01-01 00:00 UTC.
    Absolute(Duration),
}

impl Moment {
    /// Time since the start in a recording that began at `start` (since 1970) and has this length. What is outside of it
    /// becomes its start or end.
    pub fn within(self, start: Duration, elapsed: Duration) -> Duration {
        match self {
            Self::Absolute(time) => time.saturating_sub(start).min(elapsed),
            Self::AfterStart(time) => time.min(elapsed),
            Self::BeforeEnd(time) => elapsed.saturating_sub(time),
        }
    }
}

/// `@SECONDS` since 1970, or `YYYY-MM-DD HH:MM:SS` in UTC (a `T` between and a `Z` or ` UTC` after it are allowed).
fn parse_absolute(text: &str) -> Option<Duration> {
    if let Some(seconds) = text.strip_prefix('@') {
        return Duration::try_from_secs_f64(seconds.parse().ok()?).ok();
    }
    let text = text.strip_suffix('Z').or(text.strip_suffix(" UTC")).unwrap_or(text);
    let (date, time) = text.split_once(['T', ' '])?;
    let part = |text: &str| {
        text.bytes()
            .all(|byte| byte.is_ascii_digit())
            .then(|| text.parse::<u64>().ok())?
    };
    let date: Vec<u64> = date.split('-').map(part).collect::<Option<_>>()?;
    let mut clock = time.splitn(3, ':');
    let (hour, minute) = (part(clock.next()?)?, part(clock.next()?)?);
    let second: f64 = clock.next().unwrap_or("0").parse().ok()?;
    let [year @ 1970..=9999, month @ 1..=12, day @ 1..=31] = date[..] else {
        return None;
    };
    if hour > 23 || minute > 59 || !(0.0..60.0).contains(&second) {
        return None;
    }
    // Years begin in March here, so that a leap day is the last day of one.
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    let seconds = (days - 719_468) * 86_400 + hour * 3600 + minute * 60;
    Some(Duration::from_secs(seconds) + Duration::from_secs_f64(second))
}

impl std::str::FromStr for Moment {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let text = text.trim();
        match text.strip_prefix("end-").or(text.strip_prefix('-')) {
            Some(rest) => parse_duration(rest).map(Self::BeforeEnd),
            None if text.trim().starts_with('@') || text.contains('-') => {
                parse_absolute(text.trim()).map(Self::Absolute).ok_or(UnitError::Moment)
            }
            None if text.trim() == "end" => Ok(Self::BeforeEnd(Duration::ZERO)),
            None => parse_duration(text).map(Self::AfterStart),
        }
    }
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
                .within(Duration::from_secs(951_826_000), Duration::from_secs(100))
                .as_secs()
        };
        assert_eq!(
            ["90s", "1m", "-1m", "end-1m", "-0", "end", "5m", "-5m", "0"].map(of),
            [90, 60, 40, 40, 100, 100, 100, 0, 0]
        );
        assert!("--1m".parse::<Moment>().is_err());
        // 2000-02-29 12:06:40 UTC.
        assert_eq!(
            [
                "@951826050",
                "2000-02-29T12:07:30Z",
                "2000-02-29 12:07:30",
                "2000-02-29 12:07 UTC",
                "1999-01-01 00:00:00",
                "2100-03-01T00:00:00Z"
            ]
            .map(of),
            [50, 50, 50, 20, 0, 100]
        );
        for bad in [
            "@",
            "@x",
            "2000-02-29",
            "2000-13-01 00:00",
            "2000-02-29 24:00",
            "2000-02-29 1:2:3:4",
            "1969-01-01 00:00",
        ] {
            assert!(bad.parse::<Moment>().is_err(), "{bad}");
        }
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
