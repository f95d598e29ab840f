//! Points in time as Longhorn writes them: RFC 3339 in UTC, whole seconds.

const DAY: u64 = 24 * 60 * 60;

/// Seconds since 1970 as RFC 3339: `2026-11-24T06:00:00Z`.
pub fn rfc3339(seconds: u64) -> String {
    let (year, month, day) = date(seconds / DAY);
    let time = seconds % DAY;
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", time / 3600, time / 60 % 60, time % 60)
}

/// Reads what [`rfc3339`] writes. `None` for anything else, also for the same time in another zone or with a fraction.
pub fn parse_rfc3339(text: &str) -> Option<u64> {
    let number = |from: usize, to: usize| -> Option<u64> {
        let digits = text.get(from..to)?;
        digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())?
    };
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let time = number(11, 13)? * 3600 + number(14, 16)? * 60 + number(17, 19)?;
    let seconds = day_of(year, month, day)?.checked_mul(DAY)?.checked_add(time)?;
    // What stands between the numbers, and a month or an hour that there is not.
    (rfc3339(seconds) == text).then_some(seconds)
}

/// The date so many days after 1970-01-01, in the Gregorian calendar. Counted in years that begin in March, so that the
/// leap day is the last one.
const fn date(days: u64) -> (u64, u64, u64) {
    // 1970-01-01 is day 719,468 of a count that begins on 0000-03-01; 400 years have 146,097 days.
    let days = days + 719_468;
    let of_era = days % 146_097;
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // March to January have 153 days in every five months.
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let year = days / 146_097 * 400 + year_of_era;
    if month < 10 { (year, month + 3, day) } else { (year + 1, month - 9, day) }
}

/// Days from 1970-01-01 to a date; `None` before. The inverse of [`date`] for dates that there are.
fn day_of(year: u64, month: u64, day: u64) -> Option<u64> {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year.checked_sub(1)?, month + 9) };
    let of_year = (153 * month + 2) / 5 + day.checked_sub(1)?;
    let of_era = year % 400 * 365 + year % 400 / 4 - year % 400 / 100 + of_year;
    (year / 400 * 146_097 + of_era).checked_sub(719_468)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_that_others_have_computed() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (1_795_500_000, "2026-11-24T06:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(seconds), text);
            assert_eq!(parse_rfc3339(text), Some(seconds));
        }
    }

    #[test]
    fn every_day_comes_back() {
        for day in 0..200_000 {
            assert_eq!(parse_rfc3339(&rfc3339(day * DAY + day % DAY)), Some(day * DAY + day % DAY));
        }
    }

    #[test]
    fn what_is_written_otherwise_is_not_read() {
        for text in [
            "",
            "yesterday",
            "1969-12-31T23:59:59Z",
            "2026-11-24T06:00:00",
            "2026-11-24 06:00:00Z",
            "2026-11-24T06:00:00.5Z",
            "2026-11-24T06:00:00+01:00",
            "2026-11-24T24:00:00Z",
            "2026-02-29T06:00:00Z",
            "2026-00-24T06:00:00Z",
            "2026-11-00T06:00:00Z",
            "2026-11-24T06:00:0\u{663}Z",
            "+026-11-24T06:00:00Z",
        ] {
            assert_eq!(parse_rfc3339(text), None, "{text}");
        }
    }
}
