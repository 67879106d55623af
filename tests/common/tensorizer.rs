//! Writes tensorizer files field by field, so that each field can be wrong.

/// A tensor of a file: its entry, its header and its data.
#[derive(Clone, Debug)]
pub(crate) struct StoredTensor {
    pub(crate) entry: TensorFields,
    pub(crate) header: TensorFields,
    /// The version of the entry. It is written if the file has versioned entries.
    pub(crate) version: u32,
    /// The offsets of header and data in the entry. `None` stands for the right offset.
    pub(crate) header_start: Option<u64>,
    pub(crate) data_start: Option<u64>,
    /// The length of the header in its first field. `None` stands for the right length.
    pub(crate) header_len: Option<u64>,
    /// Types and values of hashes.
    pub(crate) hashes: Vec<(u8, Vec<u8>)>,
    /// The number of hashes, and the length of their section. `None` stands for the right number.
    pub(crate) hash_count: Option<u8>,
    pub(crate) hashes_len: Option<u16>,
    /// Bytes between the last field and the data.
    pub(crate) after: Vec<u8>,
    pub(crate) data: Vec<u8>,
}

/// The fields that both an entry and a header have.
#[derive(Clone, Debug)]
pub(crate) struct TensorFields {
    pub(crate) kind: u8,
    pub(crate) name: Vec<u8>,
    pub(crate) dtype: Vec<u8>,
    pub(crate) shape: Vec<u64>,
    /// The number of dimensions. `None` stands for the number in the shape.
    pub(crate) rank: Option<u8>,
    pub(crate) name_len: Option<u16>,
    pub(crate) data_len: u64,
}

/// A whole file.
#[derive(Clone, Debug)]
pub(crate) struct TensorizerFile {
    pub(crate) magic: Vec<u8>,
    pub(crate) version: u32,
    pub(crate) flags: [u8; 32],
    pub(crate) count: Option<u64>,
    /// The length of the area of entries in the head, and the number of zeros after the entries.
    pub(crate) area_len: Option<u64>,
    pub(crate) padding: usize,
    pub(crate) tensors: Vec<StoredTensor>,
    /// Zeros between the area of entries and the first header.
    pub(crate) gap: usize,
    /// The order of the entries. If it is empty, the entries have the order of the data.
    pub(crate) order: Vec<usize>,
    pub(crate) end: Vec<u8>,
}

impl StoredTensor {
    /// A tensor without faults. Its hashes do not match.
    pub(crate) fn new(name: &str, dtype: &str, shape: &[u64], data: &[u8]) -> StoredTensor {
        let fields = TensorFields {
            kind: 2,
            name: name.into(),
            dtype: dtype.into(),
            shape: shape.to_vec(),
            rank: None,
            name_len: None,
            data_len: data.len() as u64,
        };
        StoredTensor {
            entry: fields.clone(),
            header: fields,
            version: 1,
            header_start: None,
            data_start: None,
            header_len: None,
            hashes: vec![(0, vec![1; 4]), (1, vec![2; 32])],
            hash_count: None,
            hashes_len: None,
            after: Vec::new(),
            data: data.to_vec(),
        }
    }

    /// Makes the same change in the entry and in the header.
    pub(crate) fn both(&mut self, change: impl Fn(&mut TensorFields)) {
        change(&mut self.entry);
        change(&mut self.header);
    }

    fn is_long(&self) -> bool {
        self.version == 5
    }

    /// The bytes of the header.
    pub(crate) fn header_bytes(&self) -> Vec<u8> {
        let mut section = vec![self.hash_count.unwrap_or(self.hashes.len() as u8)];
        for (kind, value) in &self.hashes {
            section.extend([*kind, value.len() as u8]);
            section.extend(value);
        }
        let mut bytes = vec![0; 10];
        self.header.write(&mut bytes, self.is_long());
        bytes.extend(self.hashes_len.unwrap_or(section.len() as u16).to_le_bytes());
        bytes.extend(section);
        bytes.extend(self.header.data_len.to_le_bytes());
        bytes.extend(&self.after);
        let len = self.header_len.unwrap_or(bytes.len() as u64);
        bytes[..8].copy_from_slice(&len.to_le_bytes());
        bytes
    }
}

impl TensorFields {
    fn write(&self, bytes: &mut Vec<u8>, is_long: bool) {
        // An entry begins with the name, and a header begins with the type.
        let name_len = self.name_len.unwrap_or(self.name.len() as u16).to_le_bytes();
        bytes.push(self.kind);
        bytes.extend(name_len);
        bytes.extend(&self.name);
        self.write_rest(bytes, is_long);
    }

    fn write_rest(&self, bytes: &mut Vec<u8>, is_long: bool) {
        bytes.push(self.dtype.len() as u8);
        bytes.extend(&self.dtype);
        bytes.push(self.rank.unwrap_or(self.shape.len() as u8));
        for dim in &self.shape {
            let width = if is_long { 8 } else { 4 };
            bytes.extend(&dim.to_le_bytes()[..width]);
        }
    }

    fn write_entry(&self, bytes: &mut Vec<u8>, is_long: bool) {
        bytes.extend(self.name_len.unwrap_or(self.name.len() as u16).to_le_bytes());
        bytes.extend(&self.name);
        bytes.push(self.kind);
        self.write_rest(bytes, is_long);
    }
}

impl TensorizerFile {
    /// A file without faults.
    pub(crate) fn new(version: u32, tensors: Vec<StoredTensor>) -> TensorizerFile {
        TensorizerFile {
            magic: b"|TZR|".to_vec(),
            version,
            flags: [0; 32],
            count: None,
            area_len: None,
            padding: 0,
            gap: 0,
            tensors,
            order: Vec::new(),
            end: vec![0; 8],
        }
    }

    /// The bytes of the file.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let versioned = self.flags[0] & 2 != 0;
        let order: Vec<usize> = match self.order.as_slice() {
            [] => (0..self.tensors.len()).collect(),
            order => order.to_vec(),
        };
        // The entries are encoded twice, because the offsets of the tensors depend on the length of the entries.
        let entries = |places: &[(u64, u64)]| {
            let mut bytes = Vec::new();
            for &index in &order {
                let tensor = &self.tensors[index];
                if versioned {
                    bytes.extend(tensor.version.to_le_bytes());
                }
                tensor.entry.write_entry(&mut bytes, tensor.is_long());
                let (header, data) = places.get(index).copied().unwrap_or_default();
                bytes.extend(tensor.header_start.unwrap_or(header).to_le_bytes());
                bytes.extend(tensor.data_start.unwrap_or(data).to_le_bytes());
                bytes.extend(tensor.entry.data_len.to_le_bytes());
            }
            bytes
        };
        let area = entries(&[]).len() + self.padding;
        let (mut body, mut places) = (Vec::new(), Vec::new());
        for tensor in &self.tensors {
            let start = (73 + area + self.gap + body.len()) as u64;
            let header = tensor.header_bytes();
            places.push((start, start + header.len() as u64));
            body.extend(header);
            body.extend(&tensor.data);
        }
        let mut bytes = self.magic.clone();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.flags);
        bytes.extend([0; 16]);
        bytes.extend(self.count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        bytes.extend(self.area_len.unwrap_or(area as u64).to_le_bytes());
        bytes.extend(entries(&places));
        bytes.resize(bytes.len() + self.padding + self.gap, 0);
        bytes.extend(body);
        bytes.extend(&self.end);
        bytes
    }
}
