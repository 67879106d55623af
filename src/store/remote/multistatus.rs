//! Parser of `multistatus`, the XML answer of WebDAV servers to PROPFIND.

use quick_xml::escape::unescape;
use quick_xml::events::Event;
use quick_xml::name::{Namespace, ResolveResult};
use quick_xml::reader::NsReader;

/// The XML namespace of WebDAV. Servers add properties of their own in other namespaces.
const DAV: Namespace<'static> = Namespace("DAV:");

/// Maximum depth of XML elements. The properties are at a much smaller depth.
const DEPTH_MAX: usize = 64;

/// The properties of one place in an answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct DavResponse {
    pub(super) href: String,
    pub(super) is_folder: bool,
    /// Content length. This and the following properties are empty if the server does not send them.
    pub(super) len: String,
    pub(super) tag: String,
    pub(super) modified: String,
}

/// Properties that have a common status.
#[derive(Default)]
struct DavProperties {
    status: String,
    found: DavResponse,
}

/// Collects the responses of an XML text.
#[derive(Default)]
struct MultistatusReader {
    /// The names of the open elements. The name of an element from another namespace is stored as empty.
    open: Vec<String>,
    /// Whether the root element is in no namespace. Some servers use no namespace at all.
    is_bare: bool,
    hrefs: Vec<String>,
    response: DavResponse,
    properties: DavProperties,
    responses: Vec<DavResponse>,
}

/// The places and their properties in `text`.
///
/// # Errors
/// If `text` is not a complete answer of WebDAV, the message says why.
pub(super) fn responses_in(text: &str) -> Result<Vec<DavResponse>, String> {
    let mut reader = NsReader::from_str(text);
    let mut state = MultistatusReader::default();
    loop {
        let at = reader.buffer_position();
        let failed = |e: quick_xml::Error| format!("byte {at}: {e}");
        let (namespace, event) = reader.read_resolved_event().map_err(failed)?;
        match event {
            Event::Start(element) => {
                let name = element.local_name();
                state.begin(name.as_ref(), &namespace)?;
            }
            Event::Empty(element) => {
                let name = element.local_name();
                state.begin(name.as_ref(), &namespace)?;
                state.end();
            }
            Event::End(_) => state.end(),
            Event::Text(text) => state.text(&text.xml10_content()),
            Event::CData(text) => state.text(&text.xml10_content()),
            Event::GeneralRef(name) => {
                let text = format!("&{};", name.xml10_content());
                state.text(&unescape(&text).map_err(|e| format!("byte {at}: {e}"))?);
            }
            Event::Eof if state.open.is_empty() => return Ok(state.responses),
            Event::Eof => return Err(format!("it ends at byte {at}, inside an element")),
            Event::Comment(_) | Event::Decl(_) | Event::PI(_) | Event::DocType(_) => {}
        }
    }
}

impl MultistatusReader {
    fn begin(&mut self, name: &str, namespace: &ResolveResult<'_>) -> Result<(), String> {
        let is_dav = *namespace == ResolveResult::Bound(DAV);
        let is_unbound = *namespace == ResolveResult::Unbound;
        if self.open.is_empty() {
            if name != "multistatus" || !(is_dav || is_unbound) {
                return Err("its root is not multistatus of the namespace DAV:".to_owned());
            }
            self.is_bare = is_unbound;
        }
        if self.open.len() == DEPTH_MAX {
            return Err(format!("it has more than {DEPTH_MAX} elements in each other"));
        }
        let is_own = is_dav || (self.is_bare && is_unbound);
        self.open.push(if is_own { name.to_owned() } else { String::new() });
        match self.path().as_slice() {
            ["multistatus", "response"] => {
                self.hrefs.clear();
                self.response = DavResponse::default();
            }
            ["multistatus", "response", "href"] => self.hrefs.push(String::new()),
            ["multistatus", "response", "propstat"] => self.properties = DavProperties::default(),
            ["multistatus", "response", "propstat", "prop", "resourcetype", "collection"] => {
                self.properties.found.is_folder = true;
            }
            _ => {}
        }
        Ok(())
    }

    fn text(&mut self, text: &str) {
        let path: Vec<&str> = self.open.iter().map(String::as_str).collect();
        let of_prop = &mut self.properties.found;
        let place = match path.as_slice() {
            ["multistatus", "response", "href"] => self.hrefs.last_mut(),
            ["multistatus", "response", "propstat", "status"] => Some(&mut self.properties.status),
            ["multistatus", "response", "propstat", "prop", "getcontentlength"] => {
                Some(&mut of_prop.len)
            }
            ["multistatus", "response", "propstat", "prop", "getetag"] => Some(&mut of_prop.tag),
            ["multistatus", "response", "propstat", "prop", "getlastmodified"] => {
                Some(&mut of_prop.modified)
            }
            _ => None,
        };
        if let Some(place) = place {
            place.push_str(text);
        }
    }

    fn end(&mut self) {
        match self.path().as_slice() {
            ["multistatus", "response", "propstat"] => self.take_properties(),
            // A response with several places has one status for all of them, and no properties.
            ["multistatus", "response"] => {
                if let [href] = self.hrefs.as_slice() {
                    let href = href.trim().to_owned();
                    self.responses.push(DavResponse { href, ..std::mem::take(&mut self.response) });
                }
            }
            _ => {}
        }
        self.open.pop();
    }

    /// Keeps the properties that the place has. A server lists the others with an error status.
    fn take_properties(&mut self) {
        let DavProperties { status, found } = std::mem::take(&mut self.properties);
        let code = status.split_whitespace().nth(1);
        if code.is_some_and(|code| !code.starts_with('2')) {
            return;
        }
        self.response.is_folder |= found.is_folder;
        let all = [
            (&mut self.response.len, found.len),
            (&mut self.response.tag, found.tag),
            (&mut self.response.modified, found.modified),
        ];
        for (kept, new) in all {
            if kept.is_empty() {
                new.trim().clone_into(kept);
            }
        }
    }

    fn path(&self) -> Vec<&str> {
        self.open.iter().map(String::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_file(href: &str, len: &str) -> DavResponse {
        let (href, len) = (href.to_owned(), len.to_owned());
        DavResponse { href, len, ..DavResponse::default() }
    }

    #[test]
    fn properties_of_other_namespaces_and_responses_of_several_places_are_left_out() {
        let text = r#"<?xml version="1.0"?><!-- x --><multistatus xmlns="DAV:" xmlns:o="urn:other">
            <response><href>/a</href><href>/b</href><status>HTTP/1.1 404 Not Found</status></response>
            <response><href>/c&amp;d</href><o:href>/e</o:href><propstat><prop>
            <o:getcontentlength>1</o:getcontentlength><getcontentlength> 2 </getcontentlength>
            <o:resourcetype><collection/></o:resourcetype>
            </prop><status>HTTP/1.1 200 OK</status></propstat><responsedescription>x</responsedescription>
            <propstat><prop><resourcetype><collection/></resourcetype><getcontentlength>3</getcontentlength>
            </prop><status>HTTP/1.1 403 Forbidden</status></propstat></response>
            <sync-token>x</sync-token><response><href><![CDATA[/f]]></href><propstat><prop>
            <resourcetype><collection/></resourcetype></prop></propstat></response></multistatus>"#;
        let folder =
            DavResponse { href: "/f".to_owned(), is_folder: true, ..DavResponse::default() };
        assert_eq!(responses_in(text).unwrap(), [of_file("/c&d", "2"), folder]);
    }

    #[test]
    fn names_in_no_namespace_count_if_the_root_is_in_none_and_other_texts_are_errors() {
        let without = "<multistatus><response><href>/a</href></response></multistatus>";
        assert_eq!(responses_in(without).unwrap(), [of_file("/a", "")]);
        for begin in ["multistatus xmlns='DAV'", "D:multistatus", "html xmlns='DAV:'"] {
            let name = begin.split(' ').next().unwrap();
            let text = format!("<{begin}><response><href>/a</href></response></{name}>");
            assert!(responses_in(&text).unwrap_err().contains("its root is not multistatus"));
        }
        for text in [
            "<multistatus><b></multistatus>",
            "<D:multistatus xmlns:D='DAV:'><D:response>",
            "<multistatus>&none;</multistatus>",
        ] {
            responses_in(text).unwrap_err();
        }
        let deep = format!("<multistatus>{}", "<a>".repeat(100_000));
        assert!(responses_in(&deep).unwrap_err().contains("more than 64"));
    }
}
