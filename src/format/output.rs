//! Formats that virtual files are shown in, and that files are written in.

use super::names;

words! {
    /// A format that virtual files are shown in, and that files are written in.
    ///
    /// ```
    /// use tensorfs::OutputFormat;
    ///
    /// assert_eq!(OutputFormat::of_name("model.safetensors"), Some(OutputFormat::Safetensors));
    /// assert_eq!(OutputFormat::of_name("model.pt"), None);
    /// ```
    #[derive(Default)]
    pub enum OutputFormat {
        /// JSON header.
        #[default]
        Safetensors = "safetensors",
        /// Binary header.
        Bintensors = "bintensors",
    }
}

impl OutputFormat {
    /// Suffix of the file names of this format.
    pub fn suffix(self) -> &'static str {
        match self {
            OutputFormat::Safetensors => names::SUFFIX,
            OutputFormat::Bintensors => names::BINTENSORS_SUFFIXES[0],
        }
    }

    /// The format that the name of a file indicates.
    pub fn of_name(name: &str) -> Option<OutputFormat> {
        if name.ends_with(names::SUFFIX) {
            return Some(OutputFormat::Safetensors);
        }
        names::is_bintensors(name).then_some(OutputFormat::Bintensors)
    }
}
