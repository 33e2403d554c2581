fn main() -> anyhow::Result<()> {
    use eagle_verify::*; use eagle_verify::backend::cpu::Cpu;
    let cpu = Cpu::new()?;
    let path = smollm2::fetch::model(None)?;
    let t=std::time::Instant::now();
    let mut target = smollm2::model::Target::load(&path, &cpu, 4, 2048)?;
    eprintln!("load {:?}", t.elapsed());
    let head = Eagle3Checkpoint::load("examples/assets/smollm2-135m-eagle3", target.target_shape())?;
    target.capture(&head.config().feature_layers);
    let mut spec = Speculator::new(cpu.clone(), &head, Some(target.embedding()), SpeculatorConfig{max_requests:4,max_len:2048})?;
    let prompts: Vec<_> = ["Write a Python function that adds two numbers.","Give me three tips for staying healthy.","What is 17+25? Explain step by step."].iter().map(|p| target.tokenizer.chat(p)).collect::<Result<_,_>>()?;
    println!("{:?}", prompts[0]);
    let (t2,s2)=(&mut target,&mut spec);
    (move || -> anyhow::Result<()> {
      for _ in 0..2 {
      let p = smollm2::serve::plain(t2,&prompts,1,128)?;
      println!("plain {} tok {:.1} tok/s, target {:.2} ms/step other {:.3}", p.num_tokens(), p.num_tokens() as f64/p.total_time.as_secs_f64(), p.target_time.as_secs_f64()*1e3/p.num_steps as f64, (p.step_time-p.target_time).as_secs_f64()*1e3/p.num_steps as f64);
      for o in &p.outputs { println!("{}", t2.tokenizer.decode(o)?); }
      for (w,d,n) in [(1,2,3),(1,3,4),(4,3,6),(6,4,8),(8,4,10),(8,4,12),(8,5,16),(8,5,24),(8,5,32)] {
        let r = smollm2::serve::speculative(t2,s2,&prompts,1,128,DraftBudget::new(w,d,n)?)?;
        let st=r.num_steps as f64;
        println!("{w},{d},{n}: {:.1} tok/s {:.2}x tau {:.2} target {:.2} draft {:.2} other {:.3} same {}", r.num_tokens() as f64/r.total_time.as_secs_f64(), (p.total_time.as_secs_f64()/p.num_tokens() as f64)*r.num_tokens() as f64/r.total_time.as_secs_f64(), r.stats.acceptance_length().unwrap(), r.target_time.as_secs_f64()*1e3/st, r.draft_time.as_secs_f64()*1e3/st, (r.step_time-r.target_time-r.draft_time).as_secs_f64()*1e3/st, r.outputs==p.outputs);
      } }
      Ok(()) })()
}
mod smollm2;
