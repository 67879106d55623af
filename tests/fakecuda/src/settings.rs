//! Settings of the driver. A test sets them with environment variables `FAKE_*` before it loads the driver,
//! or later with `fakecuda_configure`.

/// A call that has to fail.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) call: String,
    /// The number of the call among those of this name, from 1.
    pub(crate) nth: u64,
    pub(crate) code: u32,
}

/// The settings of the driver.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Number of devices.
    pub(crate) devices: i32,
    /// Bytes of memory of each device.
    pub(crate) capacity: u64,
    /// The longest delay of work in a stream, in microseconds.
    pub(crate) delay: u64,
    /// Seed of the delays.
    pub(crate) seed: u64,
    /// Whether an asynchronous copy is refused if its host memory is neither pinned nor registered.
    pub(crate) strict: bool,
    /// Calls that fail.
    pub(crate) fail: Vec<Failure>,
    /// The file to which calls are written, as one line of JSON each.
    pub(crate) log: Option<String>,
}

impl Settings {
    pub(crate) fn from_environment() -> Settings {
        let mut settings = Settings {
            devices: 2,
            capacity: 1 << 30,
            delay: 0,
            seed: 1,
            strict: true,
            fail: Vec::new(),
            log: None,
        };
        for key in ["devices", "capacity", "delay", "seed", "strict", "fail", "log"] {
            if let Ok(value) = std::env::var(format!("FAKE_{}", key.to_uppercase())) {
                assert!(settings.set(key, &value), "FAKE_{}={value}", key.to_uppercase());
            }
        }
        settings
    }

    /// Sets one of the settings. Returns whether it exists and accepts the value.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> bool {
        let number = value.parse::<u64>();
        match (key, number) {
            ("devices", Ok(n)) => self.devices = n as i32,
            ("capacity", Ok(n)) => self.capacity = n,
            ("delay", Ok(n)) => self.delay = n,
            ("seed", Ok(n)) => self.seed = n.max(1),
            ("strict", Ok(n)) => self.strict = n != 0,
            ("log", _) => self.log = (!value.is_empty()).then(|| value.to_owned()),
            ("fail", _) => {
                let failures: Option<Vec<Failure>> =
                    value.split(',').filter(|one| !one.is_empty()).map(failure).collect();
                let Some(failures) = failures else { return false };
                self.fail = failures;
            }
            _ => return false,
        }
        true
    }
}

/// Parses `name:nth:code`.
fn failure(text: &str) -> Option<Failure> {
    let mut words = text.split(':');
    let (call, nth, code) = (words.next()?, words.next()?, words.next()?);
    Some(Failure { call: call.to_owned(), nth: nth.parse().ok()?, code: code.parse().ok()? })
}
