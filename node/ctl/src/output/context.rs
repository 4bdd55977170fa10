//! Contexts as they are printed.

use serde::Serialize;

use crate::table::Table;

/// A context in a list.
#[derive(Debug, Serialize)]
pub(crate) struct ListedContext {
    pub name: String,
    pub is_current: bool,
    pub cluster_id: String,
    /// In the order in which they are tried.
    pub endpoints: Vec<String>,
}

/// Contexts as a table.
pub(crate) fn context_table(contexts: &[ListedContext]) -> Table {
    let mut table = Table::new(&["CURRENT", "NAME", "CLUSTER", "ENDPOINTS"]);
    for context in contexts {
        let mark = if context.is_current { "*" } else { "" };
        table.row([
            mark.to_owned(),
            context.name.clone(),
            context.cluster_id.clone(),
            context.endpoints.join(","),
        ]);
    }
    table
}
