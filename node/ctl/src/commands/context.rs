//! `hearthctl context`: manages contexts.

use hearth_api::client::Endpoint;

use super::{print, print_json};
use crate::args::{Context, Global};
use crate::context::Contexts;
use crate::failure::Failure;
use crate::table::Table;

pub(super) fn run(global: &Global, command: Context) -> Result<(), Failure> {
    let mut contexts = Contexts::load(global.config.clone())?;
    match command {
        Context::List => {
            let mut table = Table::new(&["CURRENT", "NAME", "CLUSTER", "ENDPOINTS"]);
            for (name, context) in contexts.all() {
                let mark = if contexts.current() == Some(name) {
                    "*"
                } else {
                    ""
                };
                let endpoints = context.endpoints()?;
                let endpoints: Vec<_> = endpoints.iter().map(Endpoint::to_string).collect();
                table.row([
                    mark.to_owned(),
                    name.clone(),
                    context.cluster_id.clone(),
                    endpoints.join(","),
                ]);
            }
            print(&table.to_string())
        }
        Context::Use { name } => {
            contexts.select(&name)?;
            contexts.save()
        }
        Context::Route { address, via } => {
            contexts.route(global.context.as_deref(), &address, via.as_ref())?;
            contexts.save()
        }
        Context::Show { name } => {
            let name = name.as_deref().or(global.context.as_deref());
            print_json(contexts.get(name)?.1)
        }
    }
}
