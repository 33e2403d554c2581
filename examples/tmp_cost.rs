fn main() -> anyhow::Result<()> {
    use eagle_verify::*; use eagle_verify::backend::cpu::Cpu;
    let cpu = Cpu::new()?;
    let path = smollm2::fetch::model(None)?;
    let mut target = smollm2::model::Target::load(&path, &cpu, 4, 2048)?;
    target.capture(&[1,14,26]);
    let prompt: Vec<TokenId> = (0..200).map(|i| TokenId(1000+i*7)).collect();
    let mut table = target.new_table();
    { let lease = table.lease(200)?; target.forward(&smollm2::model::Pass::prompt(lease.table(),0,&prompt))?; lease.commit(200)?; }
    let t2=&mut target; let tb=&mut table;
    let only: Option<usize> = std::env::args().nth(1).and_then(|s| s.parse().ok());
    (move || -> anyhow::Result<()> {
      let mut base=0.;
      for n in [1usize,2,4,6,8,12,16,24,32] {
        if only.is_some_and(|o| o!=n) {continue}
        let mut tree = DraftTree::new(TokenId(5));
        for i in 1..n { tree.push(tree.node((i-1)/2).unwrap(), TokenId(i as u32*31))?; }
        let mut b = VerifyBatch::new(); b.push(RequestId(0), 201, &tree)?;
        let mut v=vec![];
        for _ in 0..(if only.is_some() {200} else {25}) {
          let lease = tb.lease(n)?;
          let pass = smollm2::model::Pass::verify(&b, std::iter::once(lease.table()));
          let t=std::time::Instant::now(); t2.forward(&pass)?; v.push(t.elapsed().as_secs_f64()*1e3);
        }
//.with_borrow_mut(|p| { for (k,v) in p.iter() { print!("   {k}: alloc {:.2} op {:.2};", v.0 as f64/25e6, v.1 as f64/25e6); } p.clear(); println!(); });
        v.sort_by(|a,b|a.total_cmp(b)); let m=v[v.len()/2]; if n==1 {base=m}
        println!("{n}: {m:.2} min {:.2}  {:.3}x", v[0], m/base);
      }
      Ok(()) })()
}
mod smollm2;
