//! What is logged of those who are not let in. Whoever reaches the port can come a thousand times a second, and the log, which is
//! rotated, is the replica's history: of strangers it has a few lines a minute, and how many more there were.

/// Lines a minute. An engine that comes with the wrong key or an old generation tries about once a second on each queue.
const LINES: u32 = 20;

const MINUTE_NS: u64 = 60_000_000_000;

/// The account of one minute.
#[derive(Debug, Default)]
pub(super) struct Strangers {
    began: u64,
    told: u32,
    untold: u64,
}

impl Strangers {
    /// True if the next line may be logged at this time, by the ring's clock. Of the lines that could not be, one tells how many they
    /// were.
    pub(super) fn may_tell(&mut self, now: u64) -> bool {
        if now.saturating_sub(self.began) >= MINUTE_NS {
            let untold = std::mem::take(self).untold;
            self.began = now;
            if untold > 0 {
                tracing::info!("{untold} more lines of connections that were not let in are not logged");
            }
        }
        let may = self.told < LINES;
        if may {
            self.told += 1;
        } else {
            self.untold += 1;
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minute_has_so_many_lines_and_the_next_one_as_many() {
        let mut strangers = Strangers::default();
        for minute in 0..3 {
            let at = MINUTE_NS * minute + 5;
            let told = (0..1000).filter(|_| strangers.may_tell(at)).count();
            assert_eq!(told, LINES as usize);
            assert_eq!(strangers.untold, 1000 - u64::from(LINES));
        }
    }
}
